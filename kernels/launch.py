"""Launching the kernels: when they can run, their compile-time numbers, block sizes, outputs.

Block sizes are fixed. A run must not stop to compile when shapes change, and results do not depend
on block sizes; `benchmarks.kernels --static` counts what they compile to. Triton is imported only
when a kernel runs. Functions take [rows, cols] matrices of any strides.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import Format, ScaleType
from megatron_snip.log import warn_once

_LOGGER = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Compute capability from which the kernels run: BF16 arithmetic."""

MAX_TILE = 128 * 128
"""Elements of the largest tile that a kernel holds in registers."""

Block = tuple[int, int]
"""(rows, cols) of a tile."""


_forced: list[bool] = []


@contextmanager
def forced(kernels: bool) -> Iterator[None]:
    """Run the kernels, or the reference, inside the `with`; for tests and benchmarks."""
    _forced.append(kernels)
    try:
        yield
    finally:
        _forced.pop()


def use_kernels(device: torch.device, *blocks: Block) -> bool:
    """Return whether kernels quantize a tensor on `device` in tiles of `blocks`.

    A CUDA tensor that takes the reference, which gives the same bits, is warned about once.

    Raises:
        UnsupportedError: if the kernels are forced and cannot run.
    """
    if _forced:
        if _forced[-1] and (reason := obstacle(device, *blocks)):
            raise UnsupportedError(f"Triton kernels are forced but cannot run: {reason}")
        return _forced[-1]
    if device.type != "cuda":
        return False
    reason = obstacle(device, *blocks)
    if reason:
        warn_once(_LOGGER, f"quantizing on {device.type} without Triton, slowly: {reason}")
    return not reason


def obstacle(device: torch.device, *blocks: Block) -> str:
    """Return why the kernels cannot run for a tensor, or an empty text if they can."""
    return _device_obstacle(device) or next(filter(None, map(_tile_obstacle, blocks)), "")


def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


@lru_cache(maxsize=1)
def triton_found() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _device_obstacle(device: torch.device) -> str:
    if not triton_found():
        return "triton is not installed (pip install triton)"
    if device.type == "cpu":
        return "" if interpreting() else "the tensor is on cpu and TRITON_INTERPRET is not set"
    if device.type != "cuda":
        return f"no kernels for {device.type}"
    capability = _capability(device)
    if capability < MIN_CAPABILITY:
        needed, found = ("{}.{}".format(*c) for c in (MIN_CAPABILITY, capability))
        return f"kernels need compute capability {needed}, this GPU has {found}"
    return ""


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _tile_obstacle(block: Block) -> str:
    if any(side < 1 or side & (side - 1) for side in block):
        return f"tile sides must be powers of two, got {block[0]}x{block[1]}"
    if block[0] * block[1] > MAX_TILE:
        return f"a {block[0]}x{block[1]} tile exceeds {MAX_TILE} elements"
    return ""


class TileSpec(NamedTuple):
    """A format and its tiles as compile-time numbers; `quantizers.reference` explains them.

    Attributes:
        largest: the element type's largest value.
        min_power_bits: FP32 bits of the smallest normal power of two.
        anchor: 1.5 * 2^(23 - mantissa bits).
        noise: 2^(-32 - mantissa bits).
        scale: 0 FP32, 1 E8M0, 2 E4M3.
        tile_rows: rows of a tile.
        tile_cols: columns of a tile.
    """

    largest: float
    min_power_bits: int
    anchor: float
    noise: float
    scale: int
    tile_rows: int
    tile_cols: int


def tile_spec(fmt: Format, block: Block) -> TileSpec:
    """Return the constants of a quantized format in tiles of `block`."""
    element = fmt.element
    assert element is not None
    return TileSpec(
        element.max_value,
        (element.min_exponent + 127) << 23,
        1.5 * 2.0 ** (23 - element.mantissa_bits),
        2.0 ** (-32 - element.mantissa_bits),
        (ScaleType.FP32, ScaleType.E8M0, ScaleType.E4M3).index(fmt.scale),
        *block,
    )


class PhiloxArguments(NamedTuple):
    """Where a kernel's random numbers come from (`quantizers.stochastic`), launch-time numbers.

    Attributes:
        key: Philox key, as a signed 64-bit number.
        columns: the four integers of a `ColumnMap`.
        mode: 0 round to nearest even; 1 eight neighbors share a counter and no column is sharded;
            2 they share one and columns are sharded; 3 any layout.
        swapped: whether the element `index` takes the number of `index ^ 4`.
    """

    key: int
    columns: tuple[int, int, int, int]
    mode: int
    swapped: bool = False


NO_RANDOM = PhiloxArguments(0, (1, 1, 1, 0), 0)
"""Round to nearest even."""


class LaunchConfig(NamedTuple):
    """Elements of a program's block (rows x cols, powers of two) and its warps."""

    rows: int
    cols: int
    num_warps: int


ROW_CONFIG = LaunchConfig(32, 128, 4)
"""Tiles along the row: 32 elements per thread, 16-byte loads, 256 bytes of a row at a time."""

COL_CONFIG = LaunchConfig(128, 64, 8)
"""Tiles along the column."""

SQUARE_CONFIG = LaunchConfig(128, 128, 8)
"""Square blocks of weights, one per program."""

BOTH_CONFIG = LaunchConfig(128, 128, 16)
"""Both directions from one read of x: 32 elements per thread."""


def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    *,
    dtype: torch.dtype,
    random: PhiloxArguments = NO_RANDOM,
    tensor_amax: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Return the dequantized matrix, [rows, cols] contiguous of `dtype` (BF16 or FP32)."""
    from megatron_snip.kernels.quantize import quantize_kernel

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    spec = tile_spec(fmt, block)
    config = config or _config(ROW_CONFIG, COL_CONFIG, SQUARE_CONFIG, spec)
    if x.numel():
        with _on(x):
            quantize_kernel[(_programs(x, config),)](
                *_source(x, tensor_amax),
                out,
                random.key,
                *random.columns,
                R=config.rows,
                C=config.cols,
                SPEC=spec,
                MODE=random.mode,
                SWAPPED=random.swapped,
                NATIVE_CASTS=not interpreting(),
                num_warps=config.num_warps,
            )
    return out


def quantize_dequantize_both(
    x: Tensor,
    formats: tuple[Format, Format],
    blocks: tuple[Block, Block],
    *,
    dtype: torch.dtype,
    random: tuple[PhiloxArguments, PhiloxArguments] = (NO_RANDOM, NO_RANDOM),
    tensor_amax: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize x two ways from one read; each result as `quantize_dequantize`'s.

    The two share a key and columns, and the second takes swapped numbers.
    """
    from megatron_snip.kernels.quantize import quantize_both_kernel

    out = [torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(2)]
    row, col = (tile_spec(fmt, block) for fmt, block in zip(formats, blocks, strict=True))
    config = config or _config(ROW_CONFIG, COL_CONFIG, BOTH_CONFIG, row, col)
    drawn = random[0] if random[0].mode else random[1]
    if x.numel():
        with _on(x):
            quantize_both_kernel[(_programs(x, config),)](
                *_source(x, tensor_amax),
                *out,
                drawn.key,
                *drawn.columns,
                R=config.rows,
                C=config.cols,
                ROW_SPEC=row,
                COL_SPEC=col,
                ROW_MODE=random[0].mode,
                COL_MODE=random[1].mode,
                NATIVE_CASTS=not interpreting(),
                num_warps=config.num_warps,
            )
    return out[0], out[1]


def _config(
    row: LaunchConfig, col: LaunchConfig, square: LaunchConfig, *specs: TileSpec
) -> LaunchConfig:
    """Return the standard block for these tiles, large enough for complete tiles of each."""
    tall = max(spec.tile_rows for spec in specs)
    wide = max(spec.tile_cols for spec in specs)
    base = row if tall == 1 else col if wide == 1 else square
    return LaunchConfig(max(base.rows, tall), max(base.cols, wide), base.num_warps)


def _programs(x: Tensor, config: LaunchConfig) -> int:
    return -(-x.shape[0] // config.rows) * -(-x.shape[1] // config.cols)


def _source(x: Tensor, tensor_amax: Tensor | None) -> tuple[Any, ...]:
    """Return the kernels' first arguments; where no amax is read, any pointer will do."""
    return x, *x.stride(), x if tensor_amax is None else tensor_amax, *x.shape


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on x's device: Triton takes the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
