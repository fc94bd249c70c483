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
def _store_sum(
    values, sums_ptr, quantity, rows, cols, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr
):
    """Write a block's sums: table [quantity, col block, row] if ROWS, else [quantity, block]."""
    pid = tl.program_id(0)
    across = tl.cdiv(cols, C)
    if ROWS:
        r = (pid // across) * R + tl.arange(0, R)
        spots = (quantity * across + pid % across).to(tl.int64) * rows + r
        tl.store(sums_ptr + spots, tl.sum(values, 1), mask=r < rows)
    else:
        spot = (quantity * across).to(tl.int64) * tl.cdiv(rows, R) + pid
        tl.store(sums_ptr + spot, tl.sum(tl.sum(values, 1), 0))


@triton.jit
def error_norms_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    amax_ptr,  # FP32 scalar, read by E4M3 scales
    rows,
    cols,
    sums_ptr,  # [1 + formats, ...] FP32: squares first, then errors
    R: tl.constexpr,
    C: tl.constexpr,
    GRIDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of squares of x and of the rounding error (to nearest even) of every grid."""
    at = block_at(rows, cols, R, C)
    x = load_block(x_ptr, x_row, x_col, at, R, C)
    _store_sum(x * x, sums_ptr, 0, rows, cols, R, C, ROWS)
    for i in tl.static_range(len(GRIDS)):
        tensor_amax = 0.0
        if GRIDS[i].scale == 2:
            tensor_amax = tl.load(amax_ptr)
        q, decode = quantize_tiles(x, 0, tensor_amax, GRIDS[i], False)
        error = x - q * spread(decode, R, C, GRIDS[i])
        _store_sum(error * error, sums_ptr, i + 1, rows, cols, R, C, ROWS)


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
    largest = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + tl.program_id(0), largest)
    tl.store(square_ptr + tl.program_id(0), tl.sum(tl.sum(x * x, 1), 0))
