"""Device functions: scale, round and store a block of tiles, bit for bit as `quantizers` do.

    amax' = max(amax, 2^-100); encode, decode as in `quantizers.scaling`
    p = max(2^exponent(y), least power);  c = anchor * p
    nearest     q = (y + c) - c
    stochastic  q = (y + noise * (b + 1/2) * p + c) - c

Rounding is arithmetic, not a cast: the interpreter casts wrongly and hardware differs in -0. All
products with p are exact and are written as fused multiply-adds, because a compiler that fuses by
itself may take y = x * encode instead, which is not exact: y must round before p is added. A
division is `div_rn`, since `/` is approximate. The clamp of y is left out where it changes
nothing: with FP32 and E8M0 scales |y| <= largest * (1 + 2^-23), which rounds to `largest` (noise
stays below half a step).

Names: R, C rows and columns of a block; x, y, q [R, C] FP32; encode, decode [R / tile rows,
C / tile cols] FP32. NaN travels as integer bits through amax, because `tl.max` drops it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# What a kernel computes with are Triton's values; they have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

_EXPONENT = tl.constexpr(0x7F800000)
_FLOOR = tl.constexpr(2.0**-100)
_INF = tl.constexpr(float("inf"))
_STORED_LEAST = tl.constexpr(2.0**-6)
_STORED_LARGEST = tl.constexpr(448.0)
_STORED_LEAST_BITS = tl.constexpr((-6 + 127) << 23)
_STORED_ANCHOR = tl.constexpr(1.5 * 2.0**20)
_ROUNDS = tl.constexpr(7)


@triton.jit
def round_nearest(y, least_bits: tl.constexpr, anchor: tl.constexpr):
    """Round to nearest even on the grid; y within range, or NaN."""
    bits = y.to(tl.int32, bitcast=True) & _EXPONENT
    power = tl.maximum(bits, least_bits).to(tl.float32, bitcast=True)
    return tl.fma(power, -anchor, tl.fma(power, anchor, y))


@triton.jit
def round_stochastic(y, draws, least_bits: tl.constexpr, anchor: tl.constexpr, noise: tl.constexpr):
    """Round to a neighbour; draws [R, C] int32 in [-2^15, 2^15)."""
    bits = y.to(tl.int32, bitcast=True) & _EXPONENT
    power = tl.maximum(bits, least_bits).to(tl.float32, bitcast=True)
    noisy = tl.fma(draws.to(tl.float32) + 0.5, power * noise, y)
    return tl.fma(power, -anchor, tl.fma(power, anchor, noisy))


@triton.jit
def tile_scales(amax, tensor_amax, GRID: tl.constexpr):
    """(encode, decode) of tiles with largest magnitude `amax`; NaN for NaN and Inf."""
    amax = tl.where(amax < _INF, amax, float("nan"))
    if GRID.scale == 2:
        top = tl.where(tensor_amax < _INF, tl.maximum(tensor_amax, _FLOOR), float("nan"))
        tensor = tl.div_rn(top, _STORED_LARGEST * GRID.largest)
        ratio = tl.div_rn(tl.div_rn(amax, GRID.largest), tensor)
        ratio = tl.clamp(ratio, _STORED_LEAST, _STORED_LARGEST, propagate_nan=tl.PropagateNan.ALL)
        stored = round_nearest(ratio, _STORED_LEAST_BITS, _STORED_ANCHOR)
        encode = tl.div_rn(tl.div_rn(1.0, tensor), stored)
        decode = stored * tensor
    else:
        floored = tl.where(amax < _FLOOR, _FLOOR, amax)
        decode = tl.div_rn(floored, GRID.largest)
        if GRID.scale == 1:
            up = ((decode.to(tl.int32, bitcast=True) + 0x007FFFFF) & _EXPONENT).to(tl.int32)
            finite = floored < _INF
            decode = tl.where(finite, up.to(tl.float32, bitcast=True), float("nan"))
            inverse = (0x7F000000 - up).to(tl.float32, bitcast=True)  # 2^-e from 2^e
            encode = tl.where(finite, inverse, float("nan"))
        else:
            encode = tl.div_rn(GRID.largest, floored)
    return encode, decode


@triton.jit
def tile_amax(x, GRID: tl.constexpr):
    """Largest magnitude of each tile: [R, C] -> [R / tile rows, C / tile cols], NaN kept."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if GRID.tile_rows == 1:
        amax = tl.max(bits.reshape(R, C // GRID.tile_cols, GRID.tile_cols), 2)
    elif GRID.tile_cols == 1:
        amax = tl.max(bits.reshape(R // GRID.tile_rows, GRID.tile_rows, C), 1)
    elif GRID.tile_rows == R and GRID.tile_cols == C:
        amax = tl.full((1, 1), tl.max(bits), tl.int32)  # one tile: threads reduce their own first
    else:
        tiles = bits.reshape(
            R // GRID.tile_rows, GRID.tile_rows, C // GRID.tile_cols, GRID.tile_cols
        )
        amax = tl.max(tl.max(tiles, 3), 1)
    return amax.to(tl.float32, bitcast=True)


@triton.jit
def spread(scale, R: tl.constexpr, C: tl.constexpr, GRID: tl.constexpr):
    """A number a tile -> a number an element, [R, C]."""
    if GRID.tile_rows == 1:
        wide = tl.broadcast_to(scale[:, :, None], (R, C // GRID.tile_cols, GRID.tile_cols))
    elif GRID.tile_cols == 1:
        wide = tl.broadcast_to(scale[:, None, :], (R // GRID.tile_rows, GRID.tile_rows, C))
    else:
        wide = tl.broadcast_to(
            scale[:, None, :, None],
            (R // GRID.tile_rows, GRID.tile_rows, C // GRID.tile_cols, GRID.tile_cols),
        )
    return wide.reshape(R, C)


@triton.jit
def quantize_tiles(x, draws, tensor_amax, GRID: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return (q, decode) of a block; `draws` is read only if STOCHASTIC."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    encode, decode = tile_scales(tile_amax(x, GRID), tensor_amax, GRID)
    y = x * spread(encode, R, C, GRID)
    if GRID.scale == 2:
        y = tl.clamp(y, -GRID.largest, GRID.largest, propagate_nan=tl.PropagateNan.ALL)
    if STOCHASTIC:
        q = round_stochastic(y, draws, GRID.least_bits, GRID.anchor, GRID.noise)
    else:
        q = round_nearest(y, GRID.least_bits, GRID.anchor)
    return q, decode


@triton.jit
def draw(key, at, place, R: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr):
    """Random numbers of a block: [R, C] int32 in [-2^15, 2^15).

    `at` = (first row, first col, rows, cols); `place` holds what `grid.Draws` lists after the key.
    """
    row0, col0, _, _ = at
    global_cols, local_chunk, global_chunk, col_start, row_start = place
    rows = (row0 + tl.arange(0, R)).to(tl.int64) + row_start
    base = (rows * global_cols)[:, None]
    cols = col0 + (tl.arange(0, C) if MODE == 3 else tl.arange(0, C // 8) * 8)
    if MODE != 1:
        cols = cols // local_chunk * global_chunk + col_start + cols % local_chunk
    index = base + cols.to(tl.int64)[None, :]
    w0, w1, w2, w3 = tl.randint4x(key, index >> 3, n_rounds=_ROUNDS)
    if MODE == 3:
        lane = (index & 7).to(tl.int32)
        word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        word = word.to(tl.int32, bitcast=True)
        draws = tl.where((lane & 1) == 0, (word << 16) >> 16, word >> 16)
    else:
        # lane = 4 * (word > 1) + 2 * (odd word) + (high half): join from the slowest bit on
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(R, C // 2)
        words = words.to(tl.int32, bitcast=True)
        draws = tl.join((words << 16) >> 16, words >> 16).reshape(R, C)
    return draws


@triton.jit
def narrow(value, dtype: tl.constexpr, NATIVE_CASTS: tl.constexpr):
    """FP32 -> `dtype`, to nearest even; NATIVE_CASTS is off in the interpreter, which truncates."""
    if dtype == tl.bfloat16 and not NATIVE_CASTS:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        rounded = tl.where(value == value, rounded, 0x7FC00000)
        value = rounded.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def payload(q, NATIVE_CASTS: tl.constexpr):
    """Grid values -> E4M3 bytes; the cast is exact, and NaN is 0x7F.

    Bytes are handed on as uint8: ptxas 12.9 can corrupt transposed FP8 stores on Hopper next to
    the untransposed ones (triton-lang/triton#11111), and int8 is clean.
    """
    codes = q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if not NATIVE_CASTS:
        codes = tl.where(q == q, codes, 0x7F).to(tl.uint8)  # the interpreter keeps NaN's own bits
    return codes
