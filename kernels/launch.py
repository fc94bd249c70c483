"""Launching the kernels: when they can run, their compile-time numbers, block sizes, outputs.

Block sizes are fixed. A run must not stop to compile when shapes change, and results do not depend
on block sizes; `benchmarks.kernels --static` counts what they compile to. Triton is imported only
when a kernel runs. Functions take [rows, cols] matrices of any strides.
"""

import importlib.util
import logging
import math
import os
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Block, Format, ScaleType
from megatron_snip.log import warn_once

_LOGGER = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Compute capability from which the kernels run: BF16 arithmetic."""

MAX_TILE = 128 * 128
"""Elements of the largest tile that a kernel holds in registers."""


def use_kernels(device: torch.device, *blocks: Block) -> bool:
    """Return whether kernels quantize a tensor on `device` in tiles of `blocks`.

    If the reference must quantize a CUDA tensor (to the same bits), a warning is logged once.
    """
    reason = obstacle(device, *blocks)
    if reason and device.type == "cuda":
        warn_once(_LOGGER, f"quantizing on {device.type} without Triton, slowly: {reason}")
    return not reason


def obstacle(device: torch.device, *blocks: Block) -> str:
    """Return why the kernels cannot run for a tensor, or an empty text if they can."""
    if device.type != "cuda":
        return f"Triton's kernels are for GPUs, not for {device.type}"
    if not triton_found():
        return "triton is not installed (pip install triton)"
    capability = compute_capability(device)
    if capability < MIN_CAPABILITY:
        needed = "{}.{}".format(*MIN_CAPABILITY)
        found = "{}.{}".format(*capability)
        return f"kernels need compute capability {needed}, this GPU has {found}"
    for rows, cols in blocks:
        if not (_is_power_of_two(rows) and _is_power_of_two(cols)):
            return f"tile sides must be powers of two, got {rows}x{cols}"
        if rows * cols > MAX_TILE:
            return f"a {rows}x{cols} tile exceeds {MAX_TILE} elements"
    return ""


def _is_power_of_two(number: int) -> bool:
    return number >= 1 and number & (number - 1) == 0


def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


@lru_cache(maxsize=1)
def triton_found() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=16)
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; kept, because every launch asks."""
    return torch.cuda.get_device_capability(device)


NEAREST = 0
"""A `PhiloxArguments.mode`: round to nearest even, without random numbers."""

UNSHARDED = 1
"""A mode: eight neighbors of a row share a counter, and nothing is sharded."""

SHARDED = 2
"""A mode: eight neighbors of a row share a counter, and columns or rows are sharded."""

UNALIGNED = 3
"""A mode: columns are laid out in any way, and each element finds its own counter."""


class PhiloxArguments(NamedTuple):
    """Where a kernel's random numbers come from (`quantizers.stochastic`).

    `key` and `columns` are launch-time numbers, `mode` and `swapped` compile-time ones.

    Attributes:
        key: The Philox key, as a signed 64-bit number.
        columns: The four integers of a `ColumnMap`; `col_start` also counts the elements of the
            rows before the tensor's first one.
        mode: NEAREST, UNSHARDED, SHARDED or UNALIGNED: how columns are laid out.
        swapped: Whether the element `index` takes the number of `index ^ 4`.
    """

    key: int
    columns: tuple[int, int, int, int]
    mode: int
    swapped: bool = False


NO_RANDOM = PhiloxArguments(0, (1, 1, 1, 0), NEAREST)
"""Round to nearest even."""


SCALES = (
    ScaleType.FP32,
    ScaleType.E8M0,
    ScaleType.E4M3,
    ScaleType.E4M3_TE,
    ScaleType.TENSOR,
    ScaleType.DELAYED,
)
"""`TileSpec.scale` is the place here. The order matters: kernels compare places."""


class TileSpec(NamedTuple):
    """A format and its tiles as compile-time numbers; `quantizers.reference` explains them.

    Attributes:
        largest: Largest value of the element type.
        least_amax: `ElementType.least_amax`.
        min_power_bits: FP32 bits of the smallest normal power of two.
        anchor: 1.5 * 2^(23 - mantissa bits), which rounds to nearest.
        noise: 2^(-32 - mantissa bits), which scales a random number of 32 bits to one step.
        scale: The place of the type of scale in `SCALES`.
        tile_rows: Number of rows of a tile.
        tile_cols: Number of columns of a tile.
        mode: See `PhiloxArguments`.
        swapped: See `PhiloxArguments`.
    """

    largest: float
    least_amax: float
    min_power_bits: int
    anchor: float
    noise: float
    scale: int
    tile_rows: int
    tile_cols: int
    mode: int
    swapped: bool


def tile_spec(fmt: Format, block: Block, random: PhiloxArguments) -> TileSpec:
    """Return the constants of a quantized format in tiles of `block`, rounded with `random`."""
    element = fmt.element
    assert element is not None
    tile_rows, tile_cols = block
    return TileSpec(
        largest=element.max_value,
        least_amax=element.least_amax,
        min_power_bits=(element.min_exponent + 127) << 23,
        anchor=1.5 * 2.0 ** (23 - element.mantissa_bits),
        noise=2.0 ** (-32 - element.mantissa_bits),
        scale=SCALES.index(fmt.scale),
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        mode=random.mode,
        swapped=random.swapped,
    )


NUM_BINS = 128
"""Number of bins of a histogram over floor(log2)."""

LOWEST_LOG2 = -96
"""The first bin; smaller numbers count there, and those from 2^32 on in the last bin."""

SCALE_ROUNDING = 1 + 2.0**-20
"""An element counts as saturated beyond its tile's largest value times this: the rounding of a
scale alone is no saturation."""

NUM_SUMS = 3
"""Sums of an operand in a format: error square, elements that became zero, that saturated."""


class LaunchConfig(NamedTuple):
    """Elements of a program's block (rows x cols, powers of two) and its warps."""

    rows: int
    cols: int
    num_warps: int


ROW_CONFIG = LaunchConfig(32, 128, 4)
"""Tiles along the row: 32 elements per thread, 16-byte loads, 256 bytes of a row at a time."""

COL_CONFIG = LaunchConfig(128, 64, 4)
"""Tiles along the column: 64 elements per thread. An SM then loads 64 KB at once, as in ROW_CONFIG;
with 8 warps it loads 48 KB, and reached 0.76 of a copy's bandwidth where ROW_CONFIG reached 1.01.
Computed from registers (`benchmarks.columns`), not measured."""

COL_RANDOM_CONFIG = LaunchConfig(128, 64, 8)
"""Tiles along the column, rounded stochastically: random numbers need registers, so all sizes load
32 KB at once, and this one keeps the most threads."""

SQUARE_CONFIG = LaunchConfig(128, 128, 8)
"""Square blocks of weights, one per program."""


def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    random: PhiloxArguments,
    *,
    dtype: torch.dtype,
    amax_or_scale: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Return x quantized and dequantized.

    Args:
        x: [rows, cols], BF16 or FP32, any strides.
        fmt: A quantized format.
        block: (rows, cols) of a tile.
        random: The random numbers to round with, or NO_RANDOM.
        dtype: The dtype of the result, BF16 or FP32.
        amax_or_scale: FP32 scalar, needed where `Format.needs_amax_or_scale`: the tensor's largest
            magnitude, or for delayed scaling its scale.
        config: The block of a program; None takes the standard one.

    Returns:
        [rows, cols], contiguous.
    """
    from megatron_snip.kernels.quantize import quantize_kernel

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    config = config or _config(block, random)
    num_programs = math.ceil(x.shape[0] / config.rows) * math.ceil(x.shape[1] / config.cols)
    if x.numel():
        # Triton takes the current device.
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            quantize_kernel[(num_programs,)](
                x,
                *x.stride(),
                x if amax_or_scale is None else amax_or_scale,  # any pointer: not read
                *x.shape,
                out,
                random.key,
                *random.columns,
                R=config.rows,
                C=config.cols,
                SPEC=tile_spec(fmt, block, random),
                NATIVE_CASTS=not interpreting(),
                num_warps=config.num_warps,
            )
    return out


def _config(block: Block, random: PhiloxArguments) -> LaunchConfig:
    """Return the standard block of a program, large enough for complete tiles."""
    tile_rows, tile_cols = block
    if tile_rows == 1:
        base = ROW_CONFIG
    elif tile_cols == 1:
        base = COL_CONFIG if random.mode == NEAREST else COL_RANDOM_CONFIG
    else:
        base = SQUARE_CONFIG
    return LaunchConfig(max(base.rows, tile_rows), max(base.cols, tile_cols), base.num_warps)
