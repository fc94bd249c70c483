from typing import Any

import torch
from transformer_engine.pytorch.gemms import gathered, reduced


class _Gather(torch.autograd.Function):  # torch's own has a wrong backward under gloo (2.15)
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return gathered(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduced(grads[0], ctx.group, of_own_tokens=True), None


class DotProductAttention(torch.nn.Module):
    """Causal attention over [s, b, heads, width]; grouped keys and values are repeated.

    Of n context-parallel ranks, rank r has chunks r and 2n - 1 - r of the sequence's 2n.
    """

    def __init__(self, num_attention_heads: int, kv_channels: Any, **unused: Any) -> None:
        super().__init__()
        self.softmax_scale = unused.get("softmax_scale")
        self.cp_group = unused.get("cp_group")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        group = self.cp_group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        chunks = torch.arange(query.shape[0] * size).chunk(2 * size)
        places = [torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)]
        if size > 1:
            key, value = (_Gather.apply(t, group) for t in (key, value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
        seen = places[rank][:, None] >= torch.cat(places)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
