"""Kernels that only read: sums of squares of a tensor and of its quantization errors, and amax.

    square = sum x^2          error_f = sum (x - Q_f(x))^2 for several formats f at once

A program takes a block and writes one number a quantity, for each of its rows (`ROWS`) or for the
whole block, into a small table that the caller adds up in FP64: no atomics, so results replay. The
twin is `quantizers.norms`. Sums differ from it in the last bits (order, fused multiply-adds).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# What a kernel computes with are Triton's values; they have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.kernels.quantize import block_at, load_block
from megatron_snip.kernels.tile import quantize_tiles, spread


@triton.jit
def _store_sum(values, sums_ptr, quantity, at, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Write a program's sums, for blocks of WIDE columns.

    The table is [quantity, col block, row] if ROWS, else [quantity, block].
    """
    R: tl.constexpr = values.shape[0]
    row0, col0, rows, cols = at
    across = tl.cdiv(cols, WIDE)
    if ROWS:
        r = row0 + tl.arange(0, R)
        spots = (quantity * across + col0 // WIDE).to(tl.int64) * rows + r
        tl.store(sums_ptr + spots, tl.sum(values, 1), mask=r < rows)
    else:
        spot = (quantity * across).to(tl.int64) * tl.cdiv(rows, R) + tl.program_id(0)
        tl.store(sums_ptr + spot, tl.sum(values))


@triton.jit
def _squared_error(x, amax_ptr, GRID: tl.constexpr):
    """Squares of the rounding error (to nearest even) on one grid, [R, C]."""
    tensor_amax = 0.0
    if GRID.scale == 2:
        tensor_amax = tl.load(amax_ptr)
    q, decode = quantize_tiles(x, 0, tensor_amax, GRID, False)
    error = x - q * spread(decode, x.shape[0], x.shape[1], GRID)
    return error * error


@triton.jit
def error_norms_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    amax_ptr,  # FP32 scalar, read by E4M3 scales
    rows,
    cols,
    sums_ptr,  # [1 + COUNT, ...] FP32: squares first, then errors
    R: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    GRID_0: tl.constexpr,
    GRID_1: tl.constexpr,
    GRID_2: tl.constexpr,
    GRID_3: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of squares of x and of its rounding error on the first COUNT grids.

    A program adds up STEPS blocks side by side, element by element, before its threads exchange
    anything: exchanging sums after every block costs more than the rounding. One large block
    (STEPS = 1) is summed at once instead, to free its registers. Grids come one by one because
    Triton 3.6 forgets the field names of tuples within tuples.
    """
    row0, col0, _, _ = block_at(rows, cols, R, C * STEPS)
    at = (row0, col0, rows, cols)
    WIDE: tl.constexpr = C * STEPS
    if STEPS == 1:
        x = load_block(x_ptr, x_row, x_col, at, R, C)
        _store_sum(x * x, sums_ptr, 0, at, WIDE, ROWS)
        _store_sum(_squared_error(x, amax_ptr, GRID_0), sums_ptr, 1, at, WIDE, ROWS)
        if COUNT > 1:
            _store_sum(_squared_error(x, amax_ptr, GRID_1), sums_ptr, 2, at, WIDE, ROWS)
        if COUNT > 2:
            _store_sum(_squared_error(x, amax_ptr, GRID_2), sums_ptr, 3, at, WIDE, ROWS)
        if COUNT > 3:
            _store_sum(_squared_error(x, amax_ptr, GRID_3), sums_ptr, 4, at, WIDE, ROWS)
    else:
        square = tl.zeros((R, C), tl.float32)
        error_0 = tl.zeros((R, C), tl.float32)
        error_1 = tl.zeros((R, C), tl.float32)
        error_2 = tl.zeros((R, C), tl.float32)
        error_3 = tl.zeros((R, C), tl.float32)
        for step in range(STEPS):
            x = load_block(x_ptr, x_row, x_col, (row0, col0 + step * C, rows, cols), R, C)
            square += x * x
            error_0 += _squared_error(x, amax_ptr, GRID_0)
            if COUNT > 1:
                error_1 += _squared_error(x, amax_ptr, GRID_1)
            if COUNT > 2:
                error_2 += _squared_error(x, amax_ptr, GRID_2)
            if COUNT > 3:
                error_3 += _squared_error(x, amax_ptr, GRID_3)
        _store_sum(square, sums_ptr, 0, at, WIDE, ROWS)
        _store_sum(error_0, sums_ptr, 1, at, WIDE, ROWS)
        if COUNT > 1:
            _store_sum(error_1, sums_ptr, 2, at, WIDE, ROWS)
        if COUNT > 2:
            _store_sum(error_2, sums_ptr, 3, at, WIDE, ROWS)
        if COUNT > 3:
            _store_sum(error_3, sums_ptr, 4, at, WIDE, ROWS)


@triton.jit
def moments_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    rows,
    cols,
    amax_ptr,  # [blocks] FP32
    square_ptr,  # [blocks] FP32
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Largest magnitude (NaN if there is one) and sum of squares of every block."""
    x = load_block(x_ptr, x_row, x_col, block_at(rows, cols, R, C), R, C)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(amax_ptr + tl.program_id(0), tl.max(bits).to(tl.float32, bitcast=True))
    tl.store(square_ptr + tl.program_id(0), tl.sum(x * x))
