"""Kernels that quantize and dequantize a matrix; the reference is `quantizers.reference`.

    amax' = max(amax, least_amax); encode and decode as in the reference
    p = max(2^exponent(y), smallest normal power of two);  c = anchor * p
    nearest     q = (y + c) - c
    stochastic  q = (y + noise * (b + 1/2) * p + c) - c

Rounding is arithmetic, not a cast: Triton's interpreter casts wrongly, and hardware differs in -0.
Products with p are exact. They are written as fused multiply-adds so that the compiler does not
fuse y = x * encode with the addition instead: y must be rounded before p is added. A division is
`div_rn`, because `/` is approximate. With FP32 and E8M0 tile scales y is not clamped: there
|y| <= largest * (1 + 2^-23), which rounds to `largest` (the noise is below half a step).

A program handles one block of complete tiles. Offsets are 64-bit. NaN passes through amax as
integer bits, because `tl.max` drops it.

Names: R, C rows and columns of a block; x, y, q [R, C] FP32; encode, decode [R / tile rows,
C / tile cols] FP32; `at` = (first row, first col, rows, cols); `layout` = the fields of
`quantizers.stochastic.ColumnMap`; SPEC a `launch.TileSpec`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels compute with Triton's values, which have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.formats import ScaleType
from megatron_snip.kernels.launch import NEAREST, SCALES, UNALIGNED, UNSHARDED

# `TileSpec.scale`. Those from _E4M3 on need a number of the entire tensor, those from _TENSOR on
# have one scale for it.
_E8M0 = tl.constexpr(SCALES.index(ScaleType.E8M0))
_E4M3 = tl.constexpr(SCALES.index(ScaleType.E4M3))
_E4M3_TE = tl.constexpr(SCALES.index(ScaleType.E4M3_TE))
_TENSOR = tl.constexpr(SCALES.index(ScaleType.TENSOR))
# `TileSpec.mode`.
_NEAREST = tl.constexpr(NEAREST)
_UNSHARDED = tl.constexpr(UNSHARDED)
_UNALIGNED = tl.constexpr(UNALIGNED)
_EXPONENT = tl.constexpr(0x7F800000)
_INF = tl.constexpr(float("inf"))
_STORED_MIN = tl.constexpr(2.0**-6)
_STORED_MAX = tl.constexpr(448.0)
_STORED_MIN_BITS = tl.constexpr((-6 + 127) << 23)
_STORED_ANCHOR = tl.constexpr(1.5 * 2.0**20)
_MULTIPLIER_A = tl.constexpr(0xD2511F53)
_MULTIPLIER_B = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def offsets_of(at, row_stride, col_stride, R: tl.constexpr, C: tl.constexpr):
    """Return (offsets, mask), [R, C], of a block in memory."""
    row0, col0, rows, cols = at
    r = row0 + tl.arange(0, R)
    c = col0 + tl.arange(0, C)
    offsets = r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride
    return offsets, (r < rows)[:, None] & (c < cols)[None, :]


@triton.jit
def load_block(x_ptr, row_stride, col_stride, at, R: tl.constexpr, C: tl.constexpr):
    """Return a block of x in FP32 [R, C], with zeros beyond the tensor's edges."""
    offsets, mask = offsets_of(at, row_stride, col_stride, R, C)
    return tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def power_of(y, min_power_bits: tl.constexpr):
    """Return p of the module's docstring."""
    bits = y.to(tl.int32, bitcast=True) & _EXPONENT
    return tl.maximum(bits, min_power_bits).to(tl.float32, bitcast=True)


@triton.jit
def round_nearest(y, power, anchor: tl.constexpr):
    """Round to nearest even on the element type's grid; y within range, or NaN."""
    return tl.fma(power, -anchor, tl.fma(power, anchor, y))


@triton.jit
def divide_by(x, largest: tl.constexpr):
    """Return x / largest as `div_rn`: right for every FP32 mantissa and for 2^a - 2^b."""
    quotient = x * (1.0 / largest)
    return tl.fma(tl.fma(quotient, -largest, x), 1.0 / largest, quotient)


@triton.jit
def tile_scales(amax, tensor_amax, SPEC: tl.constexpr):
    """Return (encode, decode) of tiles with largest magnitude `amax`; NaN for NaN and Inf."""
    amax = tl.where(amax < _INF, amax, float("nan"))
    if SPEC.scale == _E4M3:
        top = tl.where(tensor_amax < _INF, tl.maximum(tensor_amax, SPEC.least_amax), float("nan"))
        tensor = tl.div_rn(top, _STORED_MAX * SPEC.largest)
        ratio = tl.div_rn(divide_by(amax, SPEC.largest), tensor)
        ratio = tl.clamp(ratio, _STORED_MIN, _STORED_MAX, propagate_nan=tl.PropagateNan.ALL)
        stored = round_nearest(ratio, power_of(ratio, _STORED_MIN_BITS), _STORED_ANCHOR)
        encode = tl.div_rn(tl.div_rn(1.0, tensor), stored)
        decode = stored * tensor
    elif SPEC.scale == _E4M3_TE:
        top = tl.where(tensor_amax < _INF, tl.maximum(tensor_amax, SPEC.least_amax), float("nan"))
        tensor = tl.div_rn(_STORED_MAX * SPEC.largest, top)
        ratio = amax * (tensor * (1.0 / SPEC.largest))
        ratio = tl.where(ratio > _STORED_MAX, _STORED_MAX, ratio)
        stored = round_nearest(ratio, power_of(ratio, _STORED_MIN_BITS), _STORED_ANCHOR)
        encode = tl.div_rn(1.0, stored * tl.div_rn(1.0, tensor))
        encode = tl.where(stored == 0.0, 0.0, encode)
        decode = stored * (top * 2.0**-12) * (2.0**12 / (_STORED_MAX * SPEC.largest))
    else:
        floored = tl.where(amax < SPEC.least_amax, SPEC.least_amax, amax)
        decode = divide_by(floored, SPEC.largest)
        if SPEC.scale == _E8M0:
            up = ((decode.to(tl.int32, bitcast=True) + 0x007FFFFF) & _EXPONENT).to(tl.int32)
            finite = floored < _INF
            decode = tl.where(finite, up.to(tl.float32, bitcast=True), float("nan"))
            inverse = (0x7F000000 - up).to(tl.float32, bitcast=True)  # 2^-e from 2^e
            encode = tl.where(finite, inverse, float("nan"))
        else:
            encode = tl.div_rn(SPEC.largest, floored)
    return encode, decode


@triton.jit
def tensor_scales(amax_or_scale, R: tl.constexpr, C: tl.constexpr, SPEC: tl.constexpr):
    """Return (encode, decode), one for each tile, from the tensor's magnitude or its scale."""
    encode = amax_or_scale
    if SPEC.scale == _TENSOR:
        floor = tl.maximum(amax_or_scale, SPEC.least_amax)
        top = tl.where(amax_or_scale < _INF, floor, float("nan"))
        encode = tl.div_rn(SPEC.largest, top)
    shape: tl.constexpr = (R // SPEC.tile_rows, C // SPEC.tile_cols)
    decode = tl.div_rn(1.0, encode)
    return tl.broadcast_to(encode, shape), tl.broadcast_to(decode, shape)


@triton.jit
def tile_amax(x, SPEC: tl.constexpr):
    """Return the largest magnitude of each tile, [R / tile rows, C / tile cols]; NaN is found."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    size = tl.abs(x).to(tl.int32, bitcast=True)
    if SPEC.tile_rows == R and SPEC.tile_cols == C:
        amax = tl.full((1, 1), tl.max(size), size.dtype)  # one tile: threads reduce their own first
    else:
        tiles = size.reshape(
            R // SPEC.tile_rows, SPEC.tile_rows, C // SPEC.tile_cols, SPEC.tile_cols
        )
        amax = tl.max(tl.max(tiles, 3), 1)
    return amax.to(tl.float32, bitcast=True)


@triton.jit
def expand_tiles(scale, R: tl.constexpr, C: tl.constexpr, SPEC: tl.constexpr):
    """Repeat each tile's number over its elements: -> [R, C]."""
    wide = tl.broadcast_to(
        scale[:, None, :, None],
        (R // SPEC.tile_rows, SPEC.tile_rows, C // SPEC.tile_cols, SPEC.tile_cols),
    )
    return wide.reshape(R, C)


@triton.jit
def philox(key, counter):
    """Return the words of `tl.randint4x(key, counter, n_rounds=7)`: both halves by one product."""
    c0 = counter.to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    key0 = key.to(tl.uint32)
    key1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        a = c0.to(tl.uint64) * _MULTIPLIER_A
        b = c2.to(tl.uint64) * _MULTIPLIER_B
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        key0 = key0 + _WEYL_0
        key1 = key1 + _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def random_bits16(key, at, layout, R: tl.constexpr, C: tl.constexpr, SPEC: tl.constexpr):
    """Return the random numbers of a block: [R, C] int32, 2^16 * [-2^15, 2^15)."""
    row0, col0, _, _ = at
    global_cols, local_chunk, global_chunk, col_start = layout
    rows = (row0 + tl.arange(0, R)).to(tl.int64)[:, None]
    cols = col0 + (tl.arange(0, C) if SPEC.mode == _UNALIGNED else tl.arange(0, C // 8) * 8)
    if SPEC.mode != _UNSHARDED:
        cols = cols // local_chunk * global_chunk + cols % local_chunk
    cols = cols.to(tl.int64)[None, :]
    if SPEC.mode != _UNSHARDED:
        cols = cols + col_start
    if SPEC.mode == _UNALIGNED:
        index = rows * global_cols + cols
        w0, w1, w2, w3 = philox(key, index >> 3)
        lane = (index & 7).to(tl.int32) ^ (4 if SPEC.swapped else 0)
        word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        word = word.to(tl.int32, bitcast=True)
        bits16 = tl.where((lane & 1) == 0, word << 16, word & -65536)
    else:
        w0, w1, w2, w3 = philox(key, rows * (global_cols >> 3) + (cols >> 3))
        if SPEC.swapped:
            w0, w1, w2, w3 = w2, w3, w0, w1
        # lane = 4 * (word > 1) + 2 * (odd word) + (high half): join from the slowest bit on
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(R, C // 2)
        words = words.to(tl.int32, bitcast=True)
        bits16 = tl.join(words << 16, words & -65536).reshape(R, C)
    return bits16


@triton.jit
def quantize_block(x, amax_or_scale_ptr, key, at, layout, SPEC: tl.constexpr):
    """Return (what x becomes, the largest magnitudes of its tiles, their decode scales)."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if SPEC.mode != _NEAREST:
        bits16 = random_bits16(key, at, layout, R, C, SPEC)
    amax = tile_amax(x, SPEC)
    if SPEC.scale >= _TENSOR:
        encode, decode = tensor_scales(tl.load(amax_or_scale_ptr), R, C, SPEC)
    else:
        tensor_amax = 0.0
        if SPEC.scale >= _E4M3:
            tensor_amax = tl.load(amax_or_scale_ptr)
        encode, decode = tile_scales(amax, tensor_amax, SPEC)
    y = x * expand_tiles(encode, R, C, SPEC)
    if SPEC.scale >= _E4M3:
        y = tl.clamp(y, -SPEC.largest, SPEC.largest, propagate_nan=tl.PropagateNan.ALL)
    power = power_of(y, SPEC.min_power_bits)
    if SPEC.mode != _NEAREST:
        y = tl.fma(power, tl.fma(bits16.to(tl.float32), SPEC.noise, 2.0**15 * SPEC.noise), y)
    q = round_nearest(y, power, SPEC.anchor)
    return q * expand_tiles(decode, R, C, SPEC), amax, decode


@triton.jit
def store_block(value, out_ptr, at, NATIVE_CASTS: tl.constexpr):
    """Write a block of a contiguous matrix [rows, cols]."""
    _, _, _, cols = at
    offsets, mask = offsets_of(at, cols, 1, value.shape[0], value.shape[1])
    tl.store(out_ptr + offsets, _narrow(value, out_ptr.dtype.element_ty, NATIVE_CASTS), mask=mask)


@triton.jit
def _narrow(value, dtype: tl.constexpr, NATIVE_CASTS: tl.constexpr):
    """FP32 -> `dtype`, to nearest even; NATIVE_CASTS is off in the interpreter, which truncates."""
    if dtype == tl.bfloat16 and not NATIVE_CASTS:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        rounded = tl.where(value == value, rounded, 0x7FC00000)
        value = rounded.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit(do_not_specialize=["key", "col_start"])
def quantize_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    amax_or_scale_ptr,  # FP32 scalar: `amax_or_scale` of launch.py
    rows,
    cols,
    out_ptr,  # [rows, cols] BF16 or FP32, contiguous
    key: tl.int64,
    global_cols,
    local_chunk,
    global_chunk,
    col_start,
    R: tl.constexpr,
    C: tl.constexpr,
    SPEC: tl.constexpr,
    NATIVE_CASTS: tl.constexpr,
):
    """Quantize and dequantize a block of complete tiles."""
    across = tl.cdiv(cols, C)  # blocks are numbered along the row first
    at = (tl.program_id(0) // across) * R, (tl.program_id(0) % across) * C, rows, cols
    layout = (global_cols, local_chunk, global_chunk, col_start)
    x = load_block(x_ptr, x_row, x_col, at, R, C)
    value, _, _ = quantize_block(x, amax_or_scale_ptr, key, at, layout, SPEC)
    store_block(value, out_ptr, at, NATIVE_CASTS)
