"""Sums of squares of a tensor and of its quantization errors, and its largest magnitude.

    square = sum x^2            error_f = sum (x - Q_f(x))^2      rounded to nearest even

All of them come from one read of x where kernels run; nothing but the sums is written. They are
sums, so they add over shards and microbatches; take roots last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.kernels import dispatch
from megatron_snip.quantizers import reference
from megatron_snip.quantizers.reference import Block
from megatron_snip.quantizers.routes import tensor_amax_of
from megatron_snip.quantizers.tiling import PIECE_ELEMENTS


@torch.no_grad()
def error_norms(
    x: Tensor,
    specs: tuple[tuple[Format, Block], ...],
    *,
    rowwise: bool = False,
    tensor_amax: Tensor | None = None,
) -> Tensor:
    """Return sum x^2 and, for every (format, tile), sum (x - Q(x))^2.

    Args:
        x: [rows, cols], BF16 or FP32, any strides.
        specs: formats and their tiles' (rows, cols).
        rowwise: sum over each row instead of over all elements.
        tensor_amax: for E4M3 scales; None takes x's own.

    Returns:
        FP64 [1 + len(specs)], or [1 + len(specs), rows] if `rowwise`. The paths agree to FP32
        summation order: about 1e-6, relative.

    Raises:
        ValueError: if x is no matrix, or cannot be quantized so.
    """
    if x.dim() != 2:
        raise ValueError(f"error norms take a matrix, got shape {tuple(x.shape)}; flatten first")
    tiles = [reference.check(x, fmt, block, -1) for fmt, block in specs]
    amaxes = [tensor_amax_of(x, fmt, tensor_amax) for fmt, _ in specs]
    choices = [dispatch.choose(x.device, tile).path for tile in tiles]
    if choices and all(path is dispatch.Path.TRITON for path in choices):
        from megatron_snip.kernels import launch  # imports Triton

        amax = next((amax for amax in amaxes if amax is not None), None)
        return launch.error_norms(x, specs, rowwise=rowwise, tensor_amax=amax)
    return _reference(x, specs, amaxes, rowwise)


def _reference(
    x: Tensor, specs: tuple[tuple[Format, Block], ...], amaxes: list[Tensor | None], rowwise: bool
) -> Tensor:
    table = torch.empty((1 + len(specs), x.shape[0]), dtype=torch.float64, device=x.device)
    for rows in _row_runs(x, math.lcm(*(block[0] for _, block in specs))):
        part = x[rows].to(torch.float32)
        table[0, rows] = _row_squares(part)
        for i, ((fmt, block), amax) in enumerate(zip(specs, amaxes, strict=True)):
            error = reference.quantize_dequantize(part, fmt, block, tensor_amax=amax)
            table[1 + i, rows] = _row_squares(torch.sub(part, error, out=error))
    return table if rowwise else table.sum(1)


def _row_runs(x: Tensor, tile_rows: int) -> Iterator[slice]:
    """Runs of whole tiles' rows, few enough to stay in cache."""
    step = max(1, PIECE_ELEMENTS // max(1, tile_rows * x.shape[1])) * tile_rows
    for first in range(0, x.shape[0], step):
        yield slice(first, first + step)


def _row_squares(x: Tensor) -> Tensor:
    """Sum of squares of each row, FP64: [rows, cols] -> [rows]."""
    squares = x.square()
    # runs of 512 in FP32 (to 1e-7 pairwise), runs among each other in FP64
    whole = x.shape[1] - x.shape[1] % _RUN
    total = squares[:, whole:].sum(1, dtype=torch.float64)
    if whole:
        runs = squares[:, :whole].unflatten(1, (-1, _RUN)).sum(2)  # type: ignore[no-untyped-call]
        total += runs.sum(1, dtype=torch.float64)
    return total


_RUN = 512


@torch.no_grad()
def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude and the sum of squares of a matrix, from one read.

    Args:
        x: [rows, cols], BF16 or FP32, any strides.

    Returns:
        FP32 scalar, NaN where x holds one; FP64 scalar.
    """
    if dispatch.choose(x.device, (1, 1)).path is dispatch.Path.TRITON:
        from megatron_snip.kernels import launch  # imports Triton

        return launch.moments(x)
    amax = torch.zeros((), device=x.device)
    square = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in _row_runs(x, 1) if x.numel() else ():
        part = x[rows].to(torch.float32)
        amax = torch.maximum(amax, part.abs().amax())
        square += _row_squares(part).sum()
    return amax, square
