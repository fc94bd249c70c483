"""What a kernel must know of a format and of a tensor's place, as plain compile-time numbers."""

from __future__ import annotations

from typing import NamedTuple

from megatron_snip.formats import ElementType, Format, ScaleType

SCALE_KINDS = {ScaleType.FP32: 0, ScaleType.E8M0: 1, ScaleType.E4M3: 2}
"""Scale types as kernels compare them."""


class Grid(NamedTuple):
    """A format and its tiles; the rounding constants are explained in `quantizers.rounding`.

    Attributes:
        largest: the element type's largest value.
        least_bits: FP32 bits of the least normal power of two.
        anchor: 1.5 * 2^(23 - mantissa bits).
        noise: 2^(-16 - mantissa bits).
        scale: a value of SCALE_KINDS.
        tile_rows: rows of a tile.
        tile_cols: columns of a tile.
    """

    largest: float
    least_bits: int
    anchor: float
    noise: float
    scale: int
    tile_rows: int
    tile_cols: int


def make_grid(fmt: Format, block: tuple[int, int]) -> Grid:
    """Return the constants of a quantized format under tiles of `block` = (rows, cols)."""
    element = fmt.element
    assert element is not None
    return Grid(*_rounding(element), SCALE_KINDS[fmt.scale], *block)


def _rounding(element: ElementType) -> tuple[float, int, float, float]:
    anchor = 1.5 * 2.0 ** (23 - element.mantissa_bits)
    noise = 2.0 ** (-16 - element.mantissa_bits)
    return element.max_value, (element.min_exponent + 127) << 23, anchor, noise


class Draws(NamedTuple):
    """Where a kernel's random numbers come from (`quantizers.stream`), launch-time numbers.

    Attributes:
        key: Philox key of the (row-wise) copy, as a signed 64-bit number.
        global_cols: columns of the global tensor.
        local_chunk: columns of a chunk of the local tensor.
        global_chunk: columns of a chunk of the global tensor.
        col_start: the shard's first column within a global chunk.
        row_start: global row of the first local row.
        mode: 0 no randomness, 1 eight neighbours share a counter and no column is sharded,
            2 they share one and columns are sharded, 3 nothing is known.
    """

    key: int
    global_cols: int
    local_chunk: int
    global_chunk: int
    col_start: int
    row_start: int
    mode: int


NO_DRAWS = Draws(0, 1, 1, 1, 0, 0, 0)
"""Round to nearest even."""
