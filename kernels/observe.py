"""Kernels for the linears of a measured iteration; the specification is `statistics.measure`.

`observe_kernel` reads a block of an operand once. For each of two formats it writes what the GEMM
sees of the block (where products are measured), the square of its error, how many elements became
zero or saturate, and the bins of its tiles' scales. Of the operand itself: |x|^2, the largest
magnitude, the bins of its elements.

`errors_kernel` reads a product and the same product of quantized operands once. For each row it
writes their squares, and inner products with another matrix.

Sums are FP32, one for each block or row. Counts and bins are integers. So results do not depend on
the order in which blocks are done. Names are those of `kernels.quantize`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels compute with Triton's values, which have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.formats import ScaleType
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import SCALES
from megatron_snip.kernels.quantize import (
    expand_tiles,
    load_block,
    offsets_of,
    quantize_block,
    store_block,
)

_E4M3 = tl.constexpr(SCALES.index(ScaleType.E4M3))
_E4M3_TE = tl.constexpr(SCALES.index(ScaleType.E4M3_TE))
_DELAYED = tl.constexpr(SCALES.index(ScaleType.DELAYED))
_INF = tl.constexpr(float("inf"))
_SATURATES = tl.constexpr(launch.SCALE_ROUNDING)
_LOWEST_LOG2 = tl.constexpr(launch.LOWEST_LOG2)
_NUM_BINS = tl.constexpr(launch.NUM_BINS)
_NUM_SUMS = tl.constexpr(launch.NUM_SUMS)


@triton.jit
def _count_bins(numbers, is_counted, bins_ptr):
    """Count positive, finite FP32 numbers by floor(log2), in _NUM_BINS integers."""
    SIZE: tl.constexpr = numbers.numel
    exponent = ((numbers.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    index = tl.minimum(tl.maximum(exponent - _LOWEST_LOG2, 0), _NUM_BINS - 1)
    is_counted = is_counted & (numbers > 0) & (numbers < _INF)
    found = tl.histogram(index.reshape(SIZE), _NUM_BINS, mask=is_counted.reshape(SIZE))
    tl.atomic_add(bins_ptr + tl.arange(0, _NUM_BINS), found, mask=found > 0, sem="relaxed")


@triton.jit
def _observe(
    x,
    amax_or_scale_ptr,
    key,
    at,
    layout,
    out_ptr,
    sums_ptr,  # of this block
    sums_stride,
    bins_ptr,
    SPEC: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COUNTS: tl.constexpr,
    STORES: tl.constexpr,
    NATIVE_CASTS: tl.constexpr,
):
    """Quantize a block to one format, and write its values, the square of its error, and counts."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    value, amax, decode = quantize_block(x, amax_or_scale_ptr, key, at, layout, SPEC)
    if STORES:
        store_block(value, out_ptr, at, NATIVE_CASTS)
    # Beyond the edges x is 0 and so is what it became, unless a scale is NaN.
    _, mask = offsets_of(at, 1, 1, R, C)
    error = tl.where(mask, value - x, 0.0)
    tl.store(sums_ptr, tl.sum(error * error))
    if COUNTS:
        became_zero = (x != 0) & (value == 0)  # NaN is not 0
        if ROW_STRIDE > 1:
            r = at[0] + tl.arange(0, R)
            became_zero = became_zero & (r % ROW_STRIDE == 0)[:, None]
        tl.store(sums_ptr + sums_stride, tl.sum(became_zero.to(tl.int32)).to(tl.float32))
        if (SPEC.scale == _E4M3) or (SPEC.scale == _E4M3_TE) or (SPEC.scale == _DELAYED):
            limit = expand_tiles(decode * (SPEC.largest * _SATURATES), R, C, SPEC)
            beyond = (tl.abs(x) > limit) & (limit > 0)
            tl.store(sums_ptr + 2 * sums_stride, tl.sum(beyond.to(tl.int32)).to(tl.float32))
        _count_bins(decode, amax > 0, bins_ptr)


@triton.jit(do_not_specialize=["key", "col_start", "slot_0", "slot_1"])
def observe_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    amax_or_scale_0_ptr,  # FP32 scalars, as in `quantize_kernel`
    amax_or_scale_1_ptr,
    rows,
    cols,
    out_ptr,  # [F, rows, cols] BF16 or FP32, contiguous
    sums_ptr,  # FP32 [F + 1, NUM_SUMS, sums_stride], zeros: a column for each block
    sums_stride,
    bins_ptr,  # int32 [F + 1, NUM_BINS], zeros
    amax_ptr,  # int32 scalar, 0: the bits of the largest magnitude
    key: tl.int64,
    global_cols,
    local_chunk,
    global_chunk,
    col_start,
    slot_0,  # which of the F formats SPEC_0 is
    slot_1,
    R: tl.constexpr,
    C: tl.constexpr,
    SPEC_0: tl.constexpr,
    SPEC_1: tl.constexpr,  # None for one format
    ORIGINAL: tl.constexpr,  # F to observe the operand itself as well, else None
    COUNTS: tl.constexpr,  # whether more than errors and squares is wanted
    ROW_STRIDE: tl.constexpr,  # elements are counted on every ROW_STRIDE-th row,
    COL_STRIDE: tl.constexpr,  # and binned on every COL_STRIDE-th column of these
    STORES: tl.constexpr,  # whether the values are wanted; else `out_ptr` is not used
    NATIVE_CASTS: tl.constexpr,
):
    """Observe a block of complete tiles."""
    across = tl.cdiv(cols, C)
    pid = tl.program_id(0)
    at = (pid // across) * R, (pid % across) * C, rows, cols
    layout = (global_cols, local_chunk, global_chunk, col_start)
    x = load_block(x_ptr, x_row, x_col, at, R, C)
    size = rows.to(tl.int64) * cols
    slot_stride = _NUM_SUMS * sums_stride
    sums_ptr += pid
    _observe(
        x,
        amax_or_scale_0_ptr,
        key,
        at,
        layout,
        out_ptr + slot_0 * size,
        sums_ptr + slot_0 * slot_stride,
        sums_stride,
        bins_ptr + slot_0 * _NUM_BINS,
        SPEC_0,
        ROW_STRIDE,
        COUNTS,
        STORES,
        NATIVE_CASTS,
    )
    if SPEC_1 is not None:
        _observe(
            x,
            amax_or_scale_1_ptr,
            key,
            at,
            layout,
            out_ptr + slot_1 * size,
            sums_ptr + slot_1 * slot_stride,
            sums_stride,
            bins_ptr + slot_1 * _NUM_BINS,
            SPEC_1,
            ROW_STRIDE,
            COUNTS,
            STORES,
            NATIVE_CASTS,
        )
    if ORIGINAL is not None:
        tl.store(sums_ptr + ORIGINAL * slot_stride, tl.sum(x * x))
        if COUNTS:
            bits = tl.abs(x).to(tl.int32, bitcast=True)  # NaN is above Inf
            tl.atomic_max(amax_ptr, tl.max(bits), sem="relaxed")
            # Blocks begin at multiples of the strides. These elements are in the cache.
            strided = (
                at[0] // ROW_STRIDE,
                at[1] // COL_STRIDE,
                tl.cdiv(rows, ROW_STRIDE),
                tl.cdiv(cols, COL_STRIDE),
            )
            some = load_block(
                x_ptr,
                x_row * ROW_STRIDE,
                x_col * COL_STRIDE,
                strided,
                R // ROW_STRIDE,
                C // COL_STRIDE,
            )
            _count_bins(tl.abs(some), some != 0, bins_ptr + ORIGINAL * _NUM_BINS)


@triton.jit
def errors_kernel(
    product_ptr,  # FP32 [rows, cols], contiguous
    quantized_ptr,  # FP32 [F, rows, cols], contiguous
    other_ptr,  # [rows, cols], of any strides
    other_row,
    other_col,
    row_factor_ptr,  # FP32 [rows]
    row_factor_stride,
    rows,
    cols,
    out_ptr,  # FP32 [2 + 2 F, out_stride]: |other|^2, |P|^2, |E|^2 of each format, then `extra`
    out_stride,
    F: tl.constexpr,
    POWER: tl.constexpr,  # F, rounded up to a power of two
    EXTRA: tl.constexpr,  # 0: nothing; 1: <other, E>; 2: |row factor * other * E|^2
    C: tl.constexpr,
):
    """Add up a row of a product P and of its error E in each format."""
    row = tl.program_id(0).to(tl.int64)
    size = rows.to(tl.int64) * cols
    other_square = tl.zeros((C,), tl.float32)
    square = tl.zeros((C,), tl.float32)
    error_square = tl.zeros((POWER, C), tl.float32)
    extra = tl.zeros((POWER, C), tl.float32)
    f = tl.arange(0, POWER)
    for first in range(0, cols, C):
        c = first + tl.arange(0, C)
        inside = c < cols
        p = tl.load(product_ptr + row * cols + c, mask=inside, other=0.0)
        both = (f < F)[:, None] & inside[None, :]
        at = f.to(tl.int64)[:, None] * size + row * cols + c[None, :]
        q = tl.load(quantized_ptr + at, mask=both, other=0.0)
        e = tl.where(both, q - p[None, :], 0.0)
        square += p * p
        error_square += e * e
        if EXTRA > 0:
            at = row * other_row + c.to(tl.int64) * other_col
            other = tl.load(other_ptr + at, mask=inside, other=0.0).to(tl.float32)
            other_square += other * other
            if EXTRA == 1:
                extra += e * other[None, :]
            else:
                change = e * other[None, :]
                extra += change * change
    out_ptr += row
    tl.store(out_ptr, tl.sum(other_square))
    tl.store(out_ptr + out_stride, tl.sum(square))
    extra_sum = tl.sum(extra, 1)
    if EXTRA == 2:
        factor = tl.load(row_factor_ptr + row * row_factor_stride)
        extra_sum = extra_sum * (factor * factor)
    tl.store(out_ptr + (2 + f) * out_stride, tl.sum(error_square, 1), mask=f < F)
    tl.store(out_ptr + (2 + F + f) * out_stride, extra_sum, mask=f < F)
