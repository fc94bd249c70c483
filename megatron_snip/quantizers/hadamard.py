"""Random Hadamard transform along tokens, for the operands of wgrad.

With H the Sylvester-Hadamard matrix of size n over sqrt(n), and D a diagonal of random signs, each
run of n tokens t is replaced by R t with R = H D. R is orthonormal, so

    (R G)^T (R X) = G^T X

holds up to rounding, while an outlier token spreads over its n neighbors before quantization.
Source: NVIDIA, arXiv:2509.25149 (n = 16 on wgrad's operands only, one sign vector for all linears).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megatron_snip.quantizers.stochastic import random_bits16

SIGN_SEED = 0
"""Philox key of the signs in D."""


@lru_cache(maxsize=8)
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Return R = H D: [size, size], FP32; the same on every device.

    Raises:
        ValueError: if `size` is not a positive power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard transform needs a power of two, got size {size}")
    rows = torch.ones(1, 1, device=device)
    while rows.shape[0] < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)], 0)
    counters = torch.arange(-(-size // 8), device=device)
    bits = random_bits16(counters, SIGN_SEED).flatten()[:size]
    return rows.mul(torch.where(bits < 0, -1.0, 1.0)).mul(size**-0.5)


def rotate_tokens(x: Tensor, size: int) -> Tensor:
    """Return R applied to runs of `size` rows.

    Args:
        x: [tokens, cols], BF16 or FP32.
        size: tokens mixed together, a power of two.

    Returns:
        [tokens, cols], FP32; tokens after the last complete run are unchanged.
    """
    complete = x.shape[0] - x.shape[0] % size
    out = x.to(torch.float32, copy=True)
    if complete:
        runs = out[:complete].view(-1, size, x.shape[1])
        out[:complete] = (hadamard_matrix(size, x.device) @ runs).view(complete, x.shape[1])
    return out
