from typing import Any

import torch


def normalized(
    x: torch.Tensor,
    kind: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
) -> torch.Tensor:
    gain = weight.float() + (1.0 if zero_centered else 0.0)
    wide = x.float()
    if kind == "LayerNorm":
        wide = wide - wide.mean(-1, keepdim=True)
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * gain
    return (out if bias is None else out + bias.float()).to(x.dtype)


class _Norm(torch.nn.Module):
    kind = ""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        size = normalized_shape if hidden_size is None else hidden_size  # the older word
        params_dtype = params_dtype or torch.get_default_dtype()
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(size, dtype=params_dtype))
        self.bias = None
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = bool(sequence_parallel)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalized(x, self.kind, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class RMSNorm(_Norm):
    kind = "RMSNorm"


class LayerNorm(_Norm):
    kind = "LayerNorm"
