"""A tap on a linear's output: it hands X, W and G to an observer in the backward.

The tap is an identity in both directions. It sits on what the linear's own GEMM returns, before
any reduction over tensor-parallel ranks, whose backward gives every rank the full G. Activation
recompute runs the forward twice but the backward once, so what is observed is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_snip.topology import Placement, TensorAxis

OnBackward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Receives (input, weight, grad_output) as the linear saw them."""


class Observer(Protocol):
    """Watches linears during a measuring pass; called by the linears on every rank."""

    def observe(
        self,
        placement: Placement,
        input: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """Return `output`, possibly with a tap on it.

        Args:
            placement: which linear this is.
            input: [tokens or [s, b], K] as given to the linear (this rank's tokens under
                sequence parallelism).
            weight: [N, K], this rank's shard.
            output: what the linear's GEMM gave, without any reduction over ranks.
            sequence_parallel: whether the linear gathers `input` over its tensor axis.
        """
        ...


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        on_backward: OnBackward,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.on_backward = on_backward
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        input, weight = ctx.saved_tensors
        ctx.on_backward(input, weight, grads[0])
        return grads[0], None, None, None


def tap(
    output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, on_backward: OnBackward
) -> torch.Tensor:
    """Return `output`; its backward calls `on_backward(input, weight, grad_output)` once."""
    if not (torch.is_grad_enabled() and output.requires_grad):
        return output
    # A parameter among the inputs would have its gradient hooks called, without a gradient.
    plain = input.detach(), weight.detach()
    tapped: torch.Tensor = _Tap.apply(output, *plain, on_backward)  # type: ignore[no-untyped-call]
    return tapped


def all_tokens(input: torch.Tensor, axis: TensorAxis, sequence_parallel: bool) -> torch.Tensor:
    """Return X as [M, K], gathered over the tensor axis where tokens are split over it.

    All ranks of `axis` call this together when `sequence_parallel` is set.
    """
    if sequence_parallel and axis.group is not None:
        shape = (input.shape[0] * axis.size, *input.shape[1:])
        gathered = input.new_empty(shape)
        dist.all_gather_into_tensor(gathered, input.contiguous(), group=axis.group)
        input = gathered
    return input.reshape(-1, input.shape[-1])
