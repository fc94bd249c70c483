"""Kernels that quantize a matrix in one read: one direction, or rows and tokens together.

A program takes a block of whole tiles and writes either the dequantized tensor (BF16 or FP32) or
an E4M3 payload (uint8) with one FP32 decode scale a tile. `both` reads x from memory once for two
quantizations: along the row (fprop, dgrad) and along tokens (wgrad).

Every tensor is addressed through (row stride, col stride), so a transposed output is a matter of
strides; offsets are 64-bit. The twin is `quantizers.reference`.

Inside, `at` is (first row, first col, rows, cols) of a block, `out` is (values, their row stride,
their col stride, scales, their row stride, their col stride).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# What a kernel computes with are Triton's values; they have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

from megatron_snip.kernels.tile import draw, narrow, payload, quantize_tiles, spread


@triton.jit
def block_at(rows, cols, R: tl.constexpr, C: tl.constexpr):
    """Where this program's [R, C] block lies; blocks are numbered along the row first."""
    across = tl.cdiv(cols, C)
    return (tl.program_id(0) // across) * R, (tl.program_id(0) % across) * C, rows, cols


@triton.jit
def load_block(x_ptr, row_stride, col_stride, at, R: tl.constexpr, C: tl.constexpr):
    """A block of x in FP32 [R, C], zeros beyond the tensor's edges."""
    row0, col0, rows, cols = at
    r = row0 + tl.arange(0, R)
    c = col0 + tl.arange(0, C)
    spots = r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    return tl.load(x_ptr + spots, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_block(
    q, decode, out, at, GRID: tl.constexpr, PAYLOAD: tl.constexpr, NATIVE_CASTS: tl.constexpr
):
    """Write a block's values, and its scales if it is a payload."""
    R: tl.constexpr = q.shape[0]
    C: tl.constexpr = q.shape[1]
    row0, col0, rows, cols = at
    values_ptr, row_stride, col_stride, scale_ptr, scale_row, scale_col = out
    r = row0 + tl.arange(0, R)
    c = col0 + tl.arange(0, C)
    spots = r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    if PAYLOAD:
        tl.store(values_ptr + spots, payload(q, NATIVE_CASTS), mask=inside)
        tr = row0 // GRID.tile_rows + tl.arange(0, R // GRID.tile_rows)
        tc = col0 // GRID.tile_cols + tl.arange(0, C // GRID.tile_cols)
        exists = (tr * GRID.tile_rows < rows)[:, None] & (tc * GRID.tile_cols < cols)[None, :]
        spots = tr.to(tl.int64)[:, None] * scale_row + tc.to(tl.int64)[None, :] * scale_col
        tl.store(scale_ptr + spots, decode, mask=exists)
    else:
        value = q * spread(decode, R, C, GRID)
        value = narrow(value, values_ptr.dtype.element_ty, NATIVE_CASTS)
        tl.store(values_ptr + spots, value, mask=inside)


@triton.jit
def _quantize_block(
    x,
    tensor_amax,
    key,
    place,
    out,
    at,
    GRID: tl.constexpr,
    PAYLOAD: tl.constexpr,
    MODE: tl.constexpr,
    NATIVE_CASTS: tl.constexpr,
):
    """Quantize a block one way and write it."""
    draws = 0
    if MODE != 0:
        draws = draw(key, at, place, x.shape[0], x.shape[1], MODE)
    q, decode = quantize_tiles(x, draws, tensor_amax, GRID, MODE != 0)
    _store_block(q, decode, out, at, GRID, PAYLOAD, NATIVE_CASTS)


@triton.jit(do_not_specialize=["key", "row_start", "col_start"])
def quantize_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    amax_ptr,  # FP32 scalar, read by E4M3 scales
    rows,
    cols,
    out_ptr,  # [rows, cols] BF16 or FP32, or uint8 if PAYLOAD
    out_row,
    out_col,
    scale_ptr,  # [ceil(rows / tile rows), ceil(cols / tile cols)] FP32, written if PAYLOAD
    scale_row,
    scale_col,
    key: tl.int64,
    global_cols,
    local_chunk,
    global_chunk,
    col_start,
    row_start,
    R: tl.constexpr,
    C: tl.constexpr,
    GRID: tl.constexpr,
    PAYLOAD: tl.constexpr,
    MODE: tl.constexpr,
    NATIVE_CASTS: tl.constexpr,
):
    """Quantize along one direction."""
    at = block_at(rows, cols, R, C)
    x = load_block(x_ptr, x_row, x_col, at, R, C)
    tensor_amax = 0.0
    if GRID.scale == 2:
        tensor_amax = tl.load(amax_ptr)
    place = (global_cols, local_chunk, global_chunk, col_start, row_start)
    out = (out_ptr, out_row, out_col, scale_ptr, scale_row, scale_col)
    _quantize_block(x, tensor_amax, key, place, out, at, GRID, PAYLOAD, MODE, NATIVE_CASTS)


@triton.jit(do_not_specialize=["row_key", "col_key", "row_start", "col_start"])
def quantize_both_kernel(
    x_ptr,  # [rows, cols] BF16 or FP32
    x_row,
    x_col,
    amax_ptr,  # FP32 scalar, read by E4M3 scales
    rows,
    cols,
    a_ptr,  # tiles along the row: values and scales, as in `quantize_kernel`
    a_row,
    a_col,
    a_scale_ptr,
    a_scale_row,
    a_scale_col,
    b_ptr,  # tiles along tokens
    b_row,
    b_col,
    b_scale_ptr,
    b_scale_row,
    b_scale_col,
    row_key: tl.int64,
    col_key: tl.int64,
    global_cols,
    local_chunk,
    global_chunk,
    col_start,
    row_start,
    R: tl.constexpr,
    C: tl.constexpr,
    ROW_GRID: tl.constexpr,
    COL_GRID: tl.constexpr,
    PAYLOAD: tl.constexpr,
    ROW_MODE: tl.constexpr,
    COL_MODE: tl.constexpr,
    ROW_STEP: tl.constexpr,
    COL_STEP: tl.constexpr,
    NATIVE_CASTS: tl.constexpr,
):
    """Quantize along the row and along tokens from one read of x.

    The block holds whole tiles both ways, too much for registers; so it is worked off in slices
    of ROW_STEP rows and then in slices of COL_STEP columns. The second pass finds x in the first-
    level cache (32 KiB of BF16), and small slices leave room for enough programs to hide latency.
    """
    row0, col0, _, _ = block_at(rows, cols, R, C)
    tensor_amax = 0.0
    if ROW_GRID.scale == 2 or COL_GRID.scale == 2:
        tensor_amax = tl.load(amax_ptr)
    place = (global_cols, local_chunk, global_chunk, col_start, row_start)
    a = (a_ptr, a_row, a_col, a_scale_ptr, a_scale_row, a_scale_col)
    for step in range(0, R, ROW_STEP):
        at = (row0 + step, col0, rows, cols)
        x = load_block(x_ptr, x_row, x_col, at, ROW_STEP, C)
        _quantize_block(
            x, tensor_amax, row_key, place, a, at, ROW_GRID, PAYLOAD, ROW_MODE, NATIVE_CASTS
        )
    b = (b_ptr, b_row, b_col, b_scale_ptr, b_scale_row, b_scale_col)
    for step in range(0, C, COL_STEP):
        at = (row0, col0 + step, rows, cols)
        x = load_block(x_ptr, x_row, x_col, at, R, COL_STEP)
        _quantize_block(
            x, tensor_amax, col_key, place, b, at, COL_GRID, PAYLOAD, COL_MODE, NATIVE_CASTS
        )
