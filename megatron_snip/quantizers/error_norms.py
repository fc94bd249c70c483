"""Sums of squares of a matrix and of its quantization errors.

    square = sum x^2            error_f = sum (x - Q_f(x))^2      rounded to nearest even

Kernels compute all of them from one read of x. They are sums, so they add over shards and
microbatches; take roots last.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.kernels import launch
from megatron_snip.quantizers import reference
from megatron_snip.quantizers.reference import Block

_RUN = 512
"""Squares summed in FP32 (pairwise, to 1e-7) before their sum is added in FP64."""


@torch.no_grad()
def error_norms(
    x: Tensor, specs: tuple[tuple[Format, Block], ...], *, tensor_amax: Tensor | None = None
) -> Tensor:
    """Return sum x^2 and, for every (format, tile), sum (x - Q(x))^2.

    Args:
        x: [rows, cols], BF16 or FP32, any strides.
        specs: formats and their tiles' (rows, cols); at least one.
        tensor_amax: for E4M3 scales; None takes x's own.

    Returns:
        FP64 [1 + len(specs)]. Kernels and reference agree to FP32 summation order: about 1e-6,
        relative.

    Raises:
        ValueError: if x is no matrix, or cannot be quantized so.
    """
    blocks = [block for _, block in specs]
    for fmt, block in specs:
        reference.check(x, fmt, block)
    amax = reference.tensor_amax_of(x, tensor_amax, *(fmt for fmt, _ in specs))
    if launch.use_kernels(x.device, *blocks):
        return launch.error_norms(x, specs, tensor_amax=amax)
    table = torch.empty((1 + len(specs), x.shape[0]), dtype=torch.float64, device=x.device)
    tall = math.lcm(*(rows for rows, _ in blocks))
    step = max(1, reference.PIECE_ELEMENTS // max(1, tall * x.shape[1])) * tall
    for first in range(0, x.shape[0], step):  # rows of complete tiles, few enough for a cache
        rows = slice(first, first + step)
        part = x[rows].to(torch.float32)
        table[0, rows] = _row_squares(part)
        for i, (fmt, block) in enumerate(specs):
            error = reference.quantize_dequantize(part, fmt, block, tensor_amax=amax)
            table[1 + i, rows] = _row_squares(torch.sub(part, error, out=error))
    return table.sum(1)


def _row_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each row, FP64: [rows, cols] -> [rows]."""
    squares = x.square()
    complete = x.shape[1] - x.shape[1] % _RUN
    total = squares[:, complete:].sum(1, dtype=torch.float64)
    if complete:
        runs = squares[:, :complete].unflatten(1, (-1, _RUN)).sum(2)  # type: ignore[no-untyped-call]
        total += runs.sum(1, dtype=torch.float64)
    return total
