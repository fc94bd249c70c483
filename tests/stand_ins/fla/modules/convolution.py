"""The short causal convolution of each feature."""

from typing import Any

import torch
from torch.nn.functional import conv1d, silu


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Convolve [batch, tokens, features] with [features, width], then SiLU."""
    width = weight.shape[-1]
    channels = x.transpose(1, 2)
    result = conv1d(channels, weight[:, None], bias, padding=width - 1, groups=len(weight))
    return silu(result[..., : x.shape[1]]).transpose(1, 2), None
