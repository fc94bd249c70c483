"""Random Hadamard transform along tokens for the operands of wgrad.

With H the Sylvester-Hadamard matrix of size n over sqrt(n), and D a diagonal of random signs, each
run of n tokens t is replaced by R t with R = H D. R is orthonormal, so that

    (R G)^T (R X) = G^T X

holds up to rounding, while an outlier token spreads over its n neighbours before quantization.
Tokens after the last whole run stay as they are. Source: NVIDIA, arXiv:2509.25149 (n = 16 on
wgrad's operands only, one sign vector for all linears).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_snip.quantizers.philox import random_bits16


@dataclass(frozen=True)
class HadamardTransform:
    """An orthonormal random rotation of runs of `size` rows.

    Attributes:
        size: rows mixed together, a power of two; 16, or the format's tile.
        seed: 64-bit; equal seeds give equal signs, on every backend.

    Raises:
        ValueError: if `size` is not a positive power of two.
    """

    size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1):
            raise ValueError(f"a Hadamard transform needs a power of two, got size {self.size}")

    def matrix(self, device: torch.device | None = None) -> Tensor:
        """R = H D: [size, size], FP32."""
        rows = torch.ones(1, 1, device=device)
        while rows.shape[0] < self.size:
            rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)], 0)
        return rows.mul(self.signs(device)).mul(self.size**-0.5)

    def signs(self, device: torch.device | None = None) -> Tensor:
        """The diagonal of D: [size], FP32, +1 or -1."""
        counters = torch.arange(-(-self.size // 8), device=device)
        bits = random_bits16(counters, self.seed).flatten()[: self.size]
        return torch.where(bits < 0, -1.0, 1.0)

    def apply(self, x: Tensor) -> Tensor:
        """Rotate runs of rows.

        Args:
            x: [rows, cols], BF16 or FP32.

        Returns:
            [rows, cols], FP32; a short last run is left as it is.
        """
        whole = x.shape[0] - x.shape[0] % self.size
        out = x.to(torch.float32, copy=True)
        if whole:
            runs = out[:whole].view(-1, self.size, x.shape[1])
            out[:whole] = (_matrix(self, x.device) @ runs).view(whole, x.shape[1])
        return out


@lru_cache(maxsize=8)
def _matrix(transform: HadamardTransform, device: torch.device) -> Tensor:
    """R, made once a device."""
    return transform.matrix(device)
