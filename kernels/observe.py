"""Kernels for the linears of a measured iteration; the specification is `statistics.measure`.

`observe_kernel` reads a block of an operand once. For each of two formats it writes the square of
the block's error, how many elements became zero or saturate, and the bins of its tiles' scales. Of
the operand itself: |x|^2, the largest magnitude, the bins of its elements.

Sums are FP32, one for each block. Counts and bins are integers. So results do not depend on the
order in which blocks are done. Names are those of `kernels.quantize`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels compute with Triton's values, which have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.formats import ScaleType
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import SCALES
from megatron_snip.kernels.quantize import expand_tiles, load_block, offsets_of, quantize_block

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
    sums_ptr,  # of this block
    sums_stride,
    bins_ptr,
    SPEC: tl.constexpr,
):
    """Quantize a block to one format, and write the square of its error, and counts."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    value, amax, decode = quantize_block(x, amax_or_scale_ptr, key, at, layout, SPEC)
    # Beyond the edges x is 0 and so is what it became, unless a scale is NaN.
    _, mask = offsets_of(at, 1, 1, R, C)
    error = tl.where(mask, value - x, 0.0)
    tl.store(sums_ptr, tl.sum(error * error))
    became_zero = (x != 0) & (value == 0)  # NaN is not 0
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
    COL_STRIDE: tl.constexpr,  # its elements are binned on every COL_STRIDE-th column
):
    """Observe a block of complete tiles."""
    across = tl.cdiv(cols, C)
    pid = tl.program_id(0)
    at = (pid // across) * R, (pid % across) * C, rows, cols
    layout = (global_cols, local_chunk, global_chunk, col_start)
    x = load_block(x_ptr, x_row, x_col, at, R, C)
    slot_stride = _NUM_SUMS * sums_stride
    sums_ptr += pid
    _observe(
        x,
        amax_or_scale_0_ptr,
        key,
        at,
        layout,
        sums_ptr + slot_0 * slot_stride,
        sums_stride,
        bins_ptr + slot_0 * _NUM_BINS,
        SPEC_0,
    )
    if SPEC_1 is not None:
        _observe(
            x,
            amax_or_scale_1_ptr,
            key,
            at,
            layout,
            sums_ptr + slot_1 * slot_stride,
            sums_stride,
            bins_ptr + slot_1 * _NUM_BINS,
            SPEC_1,
        )
    if ORIGINAL is not None:
        tl.store(sums_ptr + ORIGINAL * slot_stride, tl.sum(x * x))
        bits = tl.abs(x).to(tl.int32, bitcast=True)  # NaN is above Inf
        tl.atomic_max(amax_ptr, tl.max(bits), sem="relaxed")
        # Blocks begin at multiples of the stride. These elements are in the cache.
        strided = at[0], at[1] // COL_STRIDE, rows, tl.cdiv(cols, COL_STRIDE)
        some = load_block(x_ptr, x_row, x_col * COL_STRIDE, strided, R, C // COL_STRIDE)
        _count_bins(tl.abs(some), some != 0, bins_ptr + ORIGINAL * _NUM_BINS)
