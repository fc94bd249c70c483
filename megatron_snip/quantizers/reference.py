"""Reference quantize-dequantize: the specification that every kernel matches bit for bit.

    x [rows, cols]  ->  q * decode scale,  q on the element type's grid, one scale per tile

A tile is a (rows, cols) block of the matrix, so one function serves 1 x 128 tiles along a row,
128 x 1 tiles along tokens and 128 x 128 blocks of weights, without transposes; the last tile of a
dimension may be short. Scales: `scaling`. Rounding: `rounding`.

The matrix is processed in pieces of complete tiles that fit into a cache. Quantizing a piece takes
about ten passes over it, and drawing its random numbers about eighty passes over an eighth of it.
The order of work and the shape of pieces change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quantizers.rounding import round_in_place
from megatron_snip.quantizers.scaling import tile_scales
from megatron_snip.quantizers.stochastic import StochasticStream

Block = tuple[int, int]
"""(rows, cols) of a tile in the tensor's own two dims."""

PIECE_ELEMENTS = 1 << 17
"""Elements of a piece, the fastest of 2^16 .. 2^18 measured: larger ones leave a 1 MiB cache,
smaller ones pay for starting some hundred operations per piece."""

_SHORT_TILE = 32


class Piece(NamedTuple):
    """A part of a matrix that consists of complete tiles, all of one shape."""

    rows: range
    cols: range
    tile: Block

    def of(self, matrix: Tensor) -> Tensor:
        """Return the piece of a [rows, cols] matrix as [R, tile rows, C, tile cols], a view."""
        part = matrix[self.rows.start : self.rows.stop, self.cols.start : self.cols.stop]
        return self.split(part)

    def split(self, part: Tensor) -> Tensor:
        """View a tensor of the piece's elements as [R, tile rows, C, tile cols]."""
        rows, cols = self.tile
        return part.view(len(self.rows) // rows, rows, len(self.cols) // cols, cols)


@torch.no_grad()
def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    *,
    stream: StochasticStream | None = None,
    tensor_amax: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return what is left of x after quantization.

    Args:
        x: [rows, cols], BF16 or FP32, any strides, may be empty.
        fmt: a quantized format; its `tile` and `weight_block` are not read.
        block: (rows, cols) of a tile.
        stream: round stochastically with these numbers; None rounds to nearest even.
        tensor_amax: FP32 scalar, needed by E4M3 scales: the largest magnitude over all shards.
        dtype: of the result: FP32 (exact up to one rounding of q * scale) or BF16 (rounded a
            second time, to nearest even).

    Returns:
        [rows, cols], contiguous.

    Raises:
        ValueError: on a dtype, shape, block, format or stream that does not fit.
    """
    check(x, fmt, block)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    # The CPU patch inspects every torch call in Python, to redirect CUDA calls. There is nothing
    # to redirect here, and a piece takes some hundred calls.
    with torch._C.DisableTorchFunction():
        _run(x, fmt, block, stream, tensor_amax, out)
    return out


def check(x: Tensor, fmt: Format, block: Block) -> None:
    """Refuse what cannot be quantized.

    Raises:
        ValueError: on a dtype, shape, block or format that does not fit.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"quantization takes float32 or bfloat16, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"quantization takes a matrix, got shape {tuple(x.shape)}; flatten first")
    if fmt.element is None:
        raise ValueError(f"format '{fmt.name}' is not quantized")
    if min(block) < 1:
        raise ValueError(f"a tile has at least one row and column, got {block}")


def pieces(shape: tuple[int, int], tile: Block) -> Iterator[Piece]:
    """Yield pieces that cover a [rows, cols] matrix once, of PIECE_ELEMENTS or one tile at most."""
    for rows, tall in _regions(shape[0], tile[0]):
        for cols, wide in _regions(shape[1], tile[1]):
            width = min(len(cols), max(1, PIECE_ELEMENTS // (tall * wide)) * wide)
            height = min(len(rows), max(1, PIECE_ELEMENTS // (tall * width)) * tall)
            for top in range(rows.start, rows.stop, height):
                for left in range(cols.start, cols.stop, width):
                    yield Piece(
                        range(top, min(top + height, rows.stop)),
                        range(left, min(left + width, cols.stop)),
                        (tall, wide),
                    )


def _regions(size: int, tile: int) -> list[tuple[range, int]]:
    """Return (indices, tile size) of the complete tiles and of the short last one."""
    complete = size - size % tile
    spans = [(range(complete), tile), (range(complete, size), size - complete)]
    return [(span, length) for span, length in spans if len(span)]


def _run(
    x: Tensor,
    fmt: Format,
    block: Block,
    stream: StochasticStream | None,
    tensor_amax: Tensor | None,
    out: Tensor,
) -> None:
    element, num_cols = fmt.element, x.shape[1]
    assert element is not None
    if stream is not None:
        stream.layout.column_map(num_cols)  # refuses a layout that does not fit, even if x is empty
    size = min(x.numel(), max(PIECE_ELEMENTS, block[0] * block[1]))
    floats = torch.empty(size, dtype=torch.float32, device=x.device)
    ints = torch.empty(size, dtype=torch.int32, device=x.device)
    for piece in pieces((x.shape[0], num_cols), block):
        count = len(piece.rows) * len(piece.cols)
        y, scratch = piece.split(floats[:count]), piece.split(ints[:count])
        source = piece.of(x)
        if source.dtype != torch.float32:
            source = y.copy_(source)
        magnitude = torch.abs(source, out=scratch.view(torch.float32))
        encode, decode = tile_scales(tile_amax(magnitude), fmt, tensor_amax)
        torch.mul(source, encode, out=y)
        y.clamp_(-element.max_value, element.max_value)
        bits16 = None
        if stream is not None:
            bits16 = piece.split(stream.bits16(piece.rows, piece.cols, num_cols, x.device))
        round_in_place(y, element, scratch, bits16)
        if out.dtype == torch.float32:
            torch.mul(y, decode, out=piece.of(out))
        else:
            piece.of(out).copy_(y * decode)


def tile_amax(magnitude: Tensor) -> Tensor:
    """Return each tile's largest magnitude: [R, r, C, c] -> [R, 1, C, 1]; NaN if it holds NaN."""
    width = magnitude.shape[3]
    while width % 2 == 0 and 1 < width <= _SHORT_TILE:
        # PyTorch reduces short runs element by element; halving them uses its vector units
        width //= 2
        magnitude = torch.maximum(magnitude[..., :width], magnitude[..., width:])
    if width > 1:
        magnitude = magnitude.amax(3, keepdim=True)
    return magnitude.amax(1, keepdim=True) if magnitude.shape[1] > 1 else magnitude
