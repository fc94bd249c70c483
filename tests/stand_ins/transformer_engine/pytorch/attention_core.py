from __future__ import annotations

from typing import Any

import torch


class DotProductAttention(torch.nn.Module):
    """Causal attention over [s, b, heads, width]; grouped keys and values are repeated."""

    def __init__(self, num_attention_heads: int, kv_channels: Any, **unused: Any) -> None:
        super().__init__()
        self.softmax_scale = unused.get("softmax_scale")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
