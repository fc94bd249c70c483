"""Running the kernels on tensors: output buffers, block sizes, launches.

Block sizes are fixed, not tuned at run time: a run must not stop to compile when shapes change,
and results do not depend on them. `benchmarks.kernels --sweep` measures the alternatives.
Functions take [rows, cols] matrices of any strides on one device.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.kernels.dispatch import interpreting
from megatron_snip.kernels.grid import NO_DRAWS, Draws, Grid, make_grid
from megatron_snip.kernels.norms import error_norms_kernel, moments_kernel
from megatron_snip.kernels.quantize import quantize_both_kernel, quantize_kernel

Block = tuple[int, int]


class Launch(NamedTuple):
    """Elements a program takes (rows x cols, powers of two) and its warps."""

    rows: int
    cols: int
    num_warps: int


ROW_LAUNCH = Launch(32, 128, 4)
"""Tiles along the row: 32 elements a thread, loads of 16 bytes, 256 bytes a row at a time."""

COL_LAUNCH = Launch(128, 64, 8)
"""Tiles along tokens: 128-byte row segments in, 128 rows out where the output is transposed."""

BLOCK_LAUNCH = Launch(128, 128, 8)
"""Square blocks of weights: one block a program."""

BOTH_LAUNCH = Launch(128, 128, 8)
"""Both directions at once: whole tiles both ways."""

ROW_STEP, COL_STEP = 32, 32
"""Rows, and columns, of the slices in which a program of both directions works."""

NORMS_LAUNCH = Launch(16, 128, 4)
"""Error norms under row tiles: 16 elements a thread and as many sums a quantity."""

NORMS_COL_LAUNCH = Launch(128, 32, 8)
"""Error norms under token tiles."""

NORMS_STEPS = 8
"""Blocks that a program of error norms takes side by side, where x is that wide."""

MOMENTS_LAUNCH = Launch(32, 128, 4)
"""Largest magnitude and sum of squares."""


def default_launch(*grids: Grid) -> Launch:
    """The launch for quantizing under these grids at once: whole tiles of every one."""
    tall = max(grid.tile_rows for grid in grids)
    wide = max(grid.tile_cols for grid in grids)
    if len(grids) > 1 and tall > 1 and wide > 1:
        return _cover(BOTH_LAUNCH, tall, wide)
    base = ROW_LAUNCH if tall == 1 else COL_LAUNCH if wide == 1 else BLOCK_LAUNCH
    return _cover(base, tall, wide)


def _cover(base: Launch, tall: int, wide: int) -> Launch:
    return Launch(max(base.rows, tall), max(base.cols, wide), base.num_warps)


def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    *,
    dtype: torch.dtype,
    draws: Draws = NO_DRAWS,
    tensor_amax: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Return the dequantized matrix, [rows, cols] contiguous of `dtype` (BF16 or FP32)."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _run_one(x, fmt, block, out, None, draws, tensor_amax, launch)
    return out


def quantize_payload(
    x: Tensor,
    fmt: Format,
    block: Block,
    *,
    transpose: bool = False,
    scales_col_major: bool = False,
    draws: Draws = NO_DRAWS,
    tensor_amax: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (E4M3 bytes as uint8, FP32 decode scales).

    Args:
        x: [rows, cols].
        fmt: a quantized format.
        block: (rows, cols) of a tile.
        transpose: store the bytes column-major; the result is still indexed [row, col].
        scales_col_major: the same for the scales.
        draws: random numbers.
        tensor_amax: for E4M3 scales.
        launch: block size; None takes the default.

    Returns:
        uint8 [rows, cols] and FP32 [ceil(rows / tile rows), ceil(cols / tile cols)].
    """
    codes, scales = _payload_buffers(x, block, transpose, scales_col_major)
    _run_one(x, fmt, block, codes, scales, draws, tensor_amax, launch)
    return codes, scales


def quantize_dequantize_both(
    x: Tensor,
    formats: tuple[Format, Format],
    blocks: tuple[Block, Block],
    *,
    dtype: torch.dtype,
    draws: tuple[Draws, Draws] = (NO_DRAWS, NO_DRAWS),
    tensor_amax: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize x two ways from one read; each result as `quantize_dequantize`'s."""
    a, b = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(2))
    _run_both(x, formats, blocks, (a, None), (b, None), draws, tensor_amax, launch)
    return a, b


def quantize_payload_both(
    x: Tensor,
    formats: tuple[Format, Format],
    blocks: tuple[Block, Block],
    *,
    draws: tuple[Draws, Draws] = (NO_DRAWS, NO_DRAWS),
    tensor_amax: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Quantize x along the row and along tokens from one read.

    Returns:
        (codes, scales) twice: for the row direction codes row-major and scales column-major, for
        the token direction codes column-major and scales row-major; that is how a GEMM with
        1 x 128 scales takes x and x^T.
    """
    row = _payload_buffers(x, blocks[0], transpose=False, scales_col_major=True)
    col = _payload_buffers(x, blocks[1], transpose=True, scales_col_major=False)
    _run_both(x, formats, blocks, row, col, draws, tensor_amax, launch)
    return row, col


def error_norms(
    x: Tensor,
    specs: tuple[tuple[Format, Block], ...],
    *,
    rowwise: bool = False,
    tensor_amax: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Sums of squares of x and of its rounding errors, nothing else written.

    Args:
        x: [rows, cols].
        specs: one or more (format, tile) pairs, rounded to nearest even.
        rowwise: one sum for each row instead of one in all.
        tensor_amax: for E4M3 scales.
        launch: block size; None takes the default.

    Returns:
        FP64 [1 + len(specs)], or [1 + len(specs), rows]: squares first, then errors.
    """
    groups = [specs[i : i + _GRIDS] for i in range(0, len(specs), _GRIDS)]
    sums = [_error_norms(x, group, rowwise, tensor_amax, launch) for group in groups]
    return torch.cat([sums[0], *(table[1:] for table in sums[1:])])


_GRIDS = 4
"""Formats that one read of x can serve."""


def norms_launch(tall: int, wide: int) -> tuple[Launch, int]:
    """(launch, blocks side by side) for error norms under tiles of at most `tall` x `wide`."""
    if tall == 1:
        return _cover(NORMS_LAUNCH, 1, wide), NORMS_STEPS
    if wide == 1:
        return _cover(NORMS_COL_LAUNCH, tall, 1), NORMS_STEPS
    return _cover(BLOCK_LAUNCH, tall, wide), 1


def _error_norms(
    x: Tensor,
    specs: tuple[tuple[Format, Block], ...],
    rowwise: bool,
    tensor_amax: Tensor | None,
    launch: Launch | None,
) -> Tensor:
    grids = [make_grid(fmt, block) for fmt, block in specs]
    tall = max(grid.tile_rows for grid in grids)
    wide = max(grid.tile_cols for grid in grids)
    default, steps = norms_launch(tall, wide)
    launch = launch or default
    if x.shape[1] < steps * launch.cols:
        steps = 1
    down = triton.cdiv(x.shape[0], launch.rows)
    across = triton.cdiv(x.shape[1], launch.cols * steps)
    shape = (across, x.shape[0]) if rowwise else (down * across,)
    sums = torch.zeros((1 + len(grids), *shape), dtype=torch.float32, device=x.device)
    if x.numel():
        named = {f"GRID_{i}": grids[min(i, len(grids) - 1)] for i in range(_GRIDS)}
        with _on(x):
            error_norms_kernel[(down * across,)](
                x,
                *x.stride(),
                _or_zero(tensor_amax, x),
                *x.shape,
                sums,
                R=launch.rows,
                C=launch.cols,
                STEPS=steps,
                **named,
                COUNT=len(grids),
                ROWS=rowwise,
                num_warps=launch.num_warps,
            )
    return sums.sum(1, dtype=torch.float64)


def moments(x: Tensor, launch: Launch = MOMENTS_LAUNCH) -> tuple[Tensor, Tensor]:
    """(largest magnitude, FP32 scalar, NaN if there is one; sum of squares, FP64 scalar)."""
    if not x.numel():
        zero = torch.zeros((), device=x.device)
        return zero, zero.double()
    down, across = _blocks(x, launch)
    amax, square = torch.empty((2, down * across), dtype=torch.float32, device=x.device)
    with _on(x):
        moments_kernel[(down * across,)](
            x,
            *x.stride(),
            *x.shape,
            amax,
            square,
            R=launch.rows,
            C=launch.cols,
            num_warps=launch.num_warps,
        )
    return amax.amax(), square.sum(dtype=torch.float64)


def _run_one(
    x: Tensor,
    fmt: Format,
    block: Block,
    out: Tensor,
    scales: Tensor | None,
    draws: Draws,
    tensor_amax: Tensor | None,
    launch: Launch | None,
) -> None:
    grid = make_grid(fmt, block)
    launch = launch or default_launch(grid)
    if not x.numel():
        return
    down, across = _blocks(x, launch)
    with _on(x):
        quantize_kernel[(down * across,)](
            x,
            *x.stride(),
            _or_zero(tensor_amax, x),
            *x.shape,
            *_target(out, scales),
            *draws[:-1],
            R=launch.rows,
            C=launch.cols,
            GRID=grid,
            PAYLOAD=scales is not None,
            MODE=draws.mode,
            NATIVE_CASTS=not interpreting(),
            num_warps=launch.num_warps,
        )


def _run_both(
    x: Tensor,
    formats: tuple[Format, Format],
    blocks: tuple[Block, Block],
    row: tuple[Tensor, Tensor | None],
    col: tuple[Tensor, Tensor | None],
    draws: tuple[Draws, Draws],
    tensor_amax: Tensor | None,
    launch: Launch | None,
) -> None:
    grids = [make_grid(fmt, block) for fmt, block in zip(formats, blocks, strict=True)]
    launch = launch or default_launch(*grids)
    if not x.numel():
        return
    down, across = _blocks(x, launch)
    place = draws[0] if draws[0].mode else draws[1]
    with _on(x):
        quantize_both_kernel[(down * across,)](
            x,
            *x.stride(),
            _or_zero(tensor_amax, x),
            *x.shape,
            *_target(*row),
            *_target(*col),
            draws[0].key,
            draws[1].key,
            *place[1:-1],
            R=launch.rows,
            C=launch.cols,
            ROW_GRID=grids[0],
            COL_GRID=grids[1],
            PAYLOAD=row[1] is not None,
            ROW_MODE=draws[0].mode,
            COL_MODE=draws[1].mode,
            ROW_STEP=max(ROW_STEP, grids[0].tile_rows),
            COL_STEP=max(COL_STEP, grids[1].tile_cols),
            NATIVE_CASTS=not interpreting(),
            num_warps=launch.num_warps,
        )


def _target(out: Tensor, scales: Tensor | None) -> tuple[Any, ...]:
    """(values, row stride, col stride, scales, row stride, col stride)."""
    scales = out if scales is None else scales  # never written then
    return (out, *out.stride(), scales, *scales.stride())


def _payload_buffers(
    x: Tensor, block: Block, transpose: bool, scales_col_major: bool
) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    grid = (triton.cdiv(rows, block[0]), triton.cdiv(cols, block[1]))
    codes = _matrix(rows, cols, torch.uint8, x.device, transpose)
    return codes, _matrix(*grid, torch.float32, x.device, scales_col_major)


def _matrix(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device, col_major: bool
) -> Tensor:
    if col_major:
        return torch.empty((cols, rows), dtype=dtype, device=device).T
    return torch.empty((rows, cols), dtype=dtype, device=device)


def _blocks(x: Tensor, launch: Launch) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], launch.rows), triton.cdiv(x.shape[1], launch.cols)


def _or_zero(tensor_amax: Tensor | None, x: Tensor) -> Tensor:
    """A pointer for the kernel; x's own where none is read."""
    return x if tensor_amax is None else tensor_amax


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on x's device: Triton takes the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
