"""Attention over context-parallel ranks, whose kernels (fused, flash) are on GPUs alone."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.te_on_cpu.extension import softmax


def replace_attention(module: ModuleType) -> None:
    """Run `DotProductAttention` of context-parallel ranks here; else it is Transformer Engine's."""
    cls = module.DotProductAttention
    original: Callable[..., Tensor] = cls.forward

    @functools.wraps(original)
    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        group = self.cp_group
        if group is None or dist.get_world_size(group) == 1:
            return original(self, query, key, value, *args, **kwargs)
        return _attention(query, key, value, group, self.unfused_attention.softmax_scale)

    cls.forward = forward


def _attention(query: Tensor, key: Tensor, value: Tensor, group: Any, scale: float) -> Tensor:
    """Causal attention over [s, b, heads, width]; grouped keys and values are repeated.

    Of n ranks, rank r has chunks r and 2n - 1 - r of the sequence's 2n.
    """
    size = dist.get_world_size(group)
    chunks = torch.arange(query.shape[0] * size).chunk(2 * size)
    places = [torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)]
    keys = _Gather.apply(key, group)
    values = _Gather.apply(value, group)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, keys, values))
    repeat = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeat, dim=1)
    v = v.repeat_interleave(repeat, dim=1)
    # As Transformer Engine's unfused attention: scores and probabilities are rounded.
    flat_q = q.flatten(0, 1)
    flat_k = k.flatten(0, 1).transpose(1, 2)
    empty = flat_q.new_zeros(len(flat_q), query.shape[0], len(keys))
    scores = torch.baddbmm(empty, flat_q, flat_k, beta=0.0, alpha=scale)
    hidden = places[dist.get_rank(group)][:, None] < torch.cat(places)
    shape = (*q.shape[:3], len(keys))
    probabilities = _Softmax.apply(scores.view(shape), hidden)
    out = torch.bmm(probabilities.flatten(0, 1), v.flatten(0, 1))
    return out.view(q.shape).permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class _Softmax(torch.autograd.Function):
    """The extension's, in which the backward takes the rounded result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, hidden: Tensor) -> Tensor:
        result = softmax.scaled_masked_softmax_forward(scores, hidden, 1.0)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return softmax.scaled_masked_softmax_backward(gradients[0], result, 1.0), None


class _Gather(torch.autograd.Function):
    """All ranks' parts, one after the other; torch's own has a wrong backward on gloo (2.15)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, part.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None
