from typing import Any

import torch


class RMSNorm(torch.nn.Module):
    """Root mean square over groups of features; the gate is in the scan."""

    def __init__(self, size: int, eps: float, group_size: int, **factory: Any) -> None:
        super().__init__()
        factory.pop("norm_before_gate")
        self.weight = torch.nn.Parameter(torch.ones(size, **factory))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normal = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normal.flatten(-2) * self.weight.float()).to(x.dtype)
