"""A kernel that only reads: sums of squares of a matrix and of its quantization errors.

    square = sum x^2          error_f = sum (x - Q_f(x))^2 for two formats f

A program writes one number per sum into a small table that the caller adds up in FP64. There are
no atomics, so results are reproducible. The reference is `quantizers.error_norms`; sums differ
from it in the last bits (order of summation, fused multiply-adds).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels compute with Triton's values, which have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.kernels.quantize import block_at, load_block, quantize_dequantize_tiles


@triton.jit
def error_norms_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    amax_ptr,  # FP32 scalar, read by E4M3 scales
    rows,
    cols,
    sums_ptr,  # [3, programs] FP32: squares, errors of FIRST, errors of SECOND
    R: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Sum over STEPS blocks side by side.

    Sums stay per element until the end: threads exchange numbers once per program, which
    would cost more than the rounding if they did it after every block.
    """
    row0, col0, _, _ = block_at(rows, cols, R, C * STEPS)
    square = tl.zeros((R, C), tl.float32)
    first = tl.zeros((R, C), tl.float32)
    second = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        x = load_block(x_ptr, x_row, x_col, (row0, col0 + step * C, rows, cols), R, C)
        square += x * x
        error = x - quantize_dequantize_tiles(x, 0, amax_ptr, FIRST, False)
        first += error * error
        error = x - quantize_dequantize_tiles(x, 0, amax_ptr, SECOND, False)
        second += error * error
    programs = tl.num_programs(0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(square))
    tl.store(sums_ptr + programs + tl.program_id(0), tl.sum(first))
    tl.store(sums_ptr + 2 * programs + tl.program_id(0), tl.sum(second))
