"""Division by the Euclidean norm of the last dimension."""

import torch


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Return `x` with vectors of length 1, in its dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)
