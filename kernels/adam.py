"""Kernels that add up what SNIP needs of AdamW's moments, from one read of them.

With m and v the moments of elements [start, end) of a weight [N, K], row after row, and inverse_d
the 1 / D of `statistics.optimizer_state`,

    inverse_d = offset + factor sqrt(v),    update = scale m / inverse_d

`block_sums_kernel` adds up the squares of one block of the weight: by row, by column, and of the
update. `total_sums_kernel` adds up the blocks in FP64. Both add in a fixed order: a measurement
that is repeated gives the same bits.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels compute with Triton's values, which have no Python types.
from __future__ import annotations

import triton
import triton.language as tl


# `start` is specialized: where 16 divides it, and K, loads are vectors.
@triton.jit(do_not_specialize=["end", "first_row", "num_rows"])
def block_sums_kernel(
    m_ptr,  # [end - start], FP32, BF16 or FP16
    v_ptr,  # the same
    start,
    end,
    first_row,  # the row of element `start`
    num_rows,  # rows that have elements in [start, end)
    cols,  # K
    offset,
    factor,
    scale,
    row_ptr,  # FP32 [blocks of columns, num_rows]
    col_ptr,  # FP32 [blocks of rows, K]
    update_ptr,  # FP32 [blocks of rows, blocks of columns]
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Add up the squares of a block [R, C]; of its elements only those in [start, end) count."""
    block_row = tl.program_id(0)
    block_col = tl.program_id(1)
    r = block_row * R + tl.arange(0, R)
    c = block_col * C + tl.arange(0, C)
    # Each row's first element, counted from element `start`, and its columns within [start, end).
    row_at = (first_row + r).to(tl.int64) * cols - start
    low = tl.minimum(tl.maximum(-row_at, 0), cols).to(tl.int32)
    high = tl.minimum(tl.maximum(end - start - row_at, 0), cols).to(tl.int32)
    mask = (c[None, :] >= low[:, None]) & (c[None, :] < high[:, None])
    at = row_at[:, None] + c[None, :]
    m = tl.load(m_ptr + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32)
    inverse_d = offset + factor * tl.sqrt_rn(v)
    square = tl.where(mask, inverse_d * inverse_d, 0.0)
    update = tl.where(mask, m / inverse_d * scale, 0.0)
    tl.store(row_ptr + block_col * num_rows + r, tl.sum(square, 1), mask=r < num_rows)
    tl.store(col_ptr + block_row.to(tl.int64) * cols + c, tl.sum(square, 0), mask=c < cols)
    tl.store(update_ptr + block_row * tl.num_programs(1) + block_col, tl.sum(update * update))


@triton.jit
def _sum_parts(part_ptr, num_parts, width, at, P: tl.constexpr):
    """Return the sums over the rows of FP32 [num_parts, width] at columns `at`, FP64.

    They are 0 where `at` is outside of the columns.
    """
    total = tl.zeros(at.shape, tl.float64)
    inside = (at >= 0) & (at < width)
    for first in range(0, num_parts, P):
        p = first + tl.arange(0, P)
        offsets = p.to(tl.int64)[:, None] * width + at[None, :]
        mask = (p < num_parts)[:, None] & inside[None, :]
        total += tl.sum(tl.load(part_ptr + offsets, mask=mask, other=0.0).to(tl.float64), 0)
    return total


@triton.jit(
    do_not_specialize=[
        "start",
        "end",
        "first_row",
        "num_rows",
        "blocks_of_rows",
        "blocks_of_cols",
        "rows",
        "cols",
    ]
)
def total_sums_kernel(
    row_ptr,  # what `block_sums_kernel` wrote, as the next two
    col_ptr,
    update_ptr,
    start,
    end,
    first_row,
    num_rows,
    blocks_of_rows,
    blocks_of_cols,
    rows,  # N
    cols,  # K
    rate_square,  # learning rate^2
    out_ptr,  # FP64 [N + K + 3]: rows, columns, then elements, |update|^2, |rate * update|^2
    B: tl.constexpr,
    P: tl.constexpr,
):
    """Add up the blocks: a program for every B rows, then one for every B columns, then one."""
    programs_of_rows = tl.cdiv(rows, B)
    programs_of_cols = tl.cdiv(cols, B)
    pid = tl.program_id(0)
    if pid < programs_of_rows:
        r = pid * B + tl.arange(0, B)
        of_rows = _sum_parts(row_ptr, blocks_of_cols, num_rows, r - first_row, P)
        tl.store(out_ptr + r, of_rows, mask=r < rows)
    elif pid < programs_of_rows + programs_of_cols:
        c = (pid - programs_of_rows) * B + tl.arange(0, B)
        of_cols = _sum_parts(col_ptr, blocks_of_rows, cols, c, P)
        tl.store(out_ptr + rows + c, of_cols, mask=c < cols)
    else:
        # [blocks of rows, blocks of columns] as one row of blocks.
        num_blocks = blocks_of_rows * blocks_of_cols
        total = tl.zeros((P * B,), tl.float64)
        for first in range(0, num_blocks, P * B):
            at = first + tl.arange(0, P * B)
            part = tl.load(update_ptr + at, mask=at < num_blocks, other=0.0)
            total += part.to(tl.float64)
        update_square = tl.sum(total)
        out_ptr += rows + cols
        tl.store(out_ptr, (end - start).to(tl.float64))
        tl.store(out_ptr + 1, update_square)
        tl.store(out_ptr + 2, update_square * rate_square)
