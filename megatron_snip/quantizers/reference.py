"""Reference quantize and dequantize: the specification that every kernel matches bit for bit.

    x [.., rows, cols]  ->  values (on the element type's grid) and one scale a tile,
    dequantized = values * decode scale

Tiles are (tile rows, tile cols) blocks of the last two dims, so that one function serves 1 x 128
tiles along a row, 128 x 1 tiles along tokens and 128 x 128 blocks of weights, without transposes;
the last tile of a dim may be short. Scales: `scaling`. Rounding: `rounding`. Order of work and
shape of pieces change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_snip.formats import Format, ScaleType
from megatron_snip.quantizers.rounding import round_in_place
from megatron_snip.quantizers.scaling import TileScales, tile_scales
from megatron_snip.quantizers.stream import StochasticStream
from megatron_snip.quantizers.tiling import Piece, grid_shape, pieces

Block = tuple[int, int]
"""(rows, cols) of a tile in the tensor's own last two dims."""


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor.

    Attributes:
        values: [.., rows, cols], FP32, on the element type's grid (unscaled).
        scales: [.., ceil(rows / block rows), ceil(cols / block cols)], FP32; multiply `values`
            by them to dequantize.
        block: (rows, cols) of a tile.
        format: the format's row in the table.
        tensor_amax: FP32 scalar behind a per-tensor scale (E4M3 scales), else None.
    """

    values: Tensor
    scales: Tensor
    block: Block
    format: Format
    tensor_amax: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values * scales, rounded once more if `dtype` is narrower than FP32."""
        out = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        grid = self.scales.flatten(0, -3) if self.scales.dim() > 2 else self.scales[None]
        for source, scale, target in zip(matrices(self.values), grid, matrices(out), strict=True):
            for piece in pieces(_shape(source), self.block):
                scale_into(piece.of(source), piece.of_grid(scale), piece.of(target))
        return out


@torch.no_grad()
def quantize(
    x: Tensor,
    fmt: Format,
    block: Block | int,
    *,
    dim: int = -1,
    stream: StochasticStream | None = None,
    tensor_amax: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize tile by tile.

    Args:
        x: [.., rows, cols], BF16 or FP32, any strides, may be empty.
        fmt: a quantized format; its `tile` and `weight_block` are not looked at.
        block: (rows, cols) of a tile, or one length for 1-D tiles along `dim`.
        dim: the tiles' dim when `block` is one length: -1 (cols) or -2 (rows, along tokens).
        stream: round stochastically with these numbers; None rounds to nearest even. Leading dims
            of x count as further rows.
        tensor_amax: FP32 scalar for formats with E4M3 scales: the largest magnitude over all
            shards of the tensor. None takes x's own.

    Raises:
        ValueError: on a dtype, shape, block or format that cannot be quantized.
    """
    tile = check(x, fmt, block, dim)
    amax = tensor_amax_of(x, fmt, tensor_amax)
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    grid = grid_shape(_shape(x), tile)
    scales = torch.empty((*x.shape[:-2], *grid), dtype=torch.float32, device=x.device)
    _run(x, fmt, tile, stream, amax, values, scales, dequantize=False)
    return QuantizedTensor(values, scales, tile, fmt, amax)


@torch.no_grad()
def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block | int,
    *,
    dim: int = -1,
    stream: StochasticStream | None = None,
    tensor_amax: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return what is left of x after quantization; arguments as in `quantize`.

    Args:
        x: [.., rows, cols], BF16 or FP32.
        fmt: the format.
        block: tile shape or length.
        dim: the tiles' dim when `block` is one length.
        stream: random numbers, or None.
        tensor_amax: for E4M3 scales.
        dtype: of the result: FP32 (exact up to one rounding of values * scale) or BF16 (rounded a
            second time, to nearest even).

    Returns:
        x's shape, contiguous.
    """
    tile = check(x, fmt, block, dim)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _run(x, fmt, tile, stream, tensor_amax_of(x, fmt, tensor_amax), out, None, dequantize=True)
    return out


def scale_into(values: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write values * scale to `out`, through FP32 when `out` is narrower."""
    if out.dtype == torch.float32:
        torch.mul(values, scale, out=out)
    else:
        out.copy_(values * scale)


def _run(
    x: Tensor,
    fmt: Format,
    tile: Block,
    stream: StochasticStream | None,
    tensor_amax: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    *,
    dequantize: bool,
) -> None:
    """Quantize every piece of x into `out`, and decode scales into `scales`."""
    # A run on the CPU patch looks at every call of torch in Python, to redirect CUDA's. There is
    # nothing to redirect here, and some hundred calls a piece to look at.
    with torch._C.DisableTorchFunction():
        _run_pieces(x, fmt, tile, stream, tensor_amax, out, scales, dequantize=dequantize)


def _run_pieces(
    x: Tensor,
    fmt: Format,
    tile: Block,
    stream: StochasticStream | None,
    tensor_amax: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    *,
    dequantize: bool,
) -> None:
    shape = _shape(x)
    if stream is not None:
        stream.layout.column_map(shape[1])  # refuse a layout that does not fit, even if x is empty
    grids = [None] * _count(x) if scales is None else matrices(scales)
    worker = _Worker(fmt, x.device)
    for index, (source, target, grid) in enumerate(
        zip(matrices(x), matrices(out), grids, strict=True)
    ):
        for piece in pieces(shape, tile):
            bits = None
            if stream is not None:
                rows = range(
                    index * shape[0] + piece.rows.start, index * shape[0] + piece.rows.stop
                )
                bits = piece.split(stream.bits16(rows, piece.cols, shape[1], x.device))
            values, tiles = worker.quantize(piece, source, tensor_amax, bits)
            if dequantize:
                scale_into(values, tiles.decode, piece.of(target))
            else:
                piece.of(target).copy_(values)
            if grid is not None:
                piece.of_grid(grid).copy_(tiles.decode)


class _Worker:
    """Quantizes pieces one after another in the same scratch memory."""

    def __init__(self, fmt: Format, device: torch.device) -> None:
        assert fmt.element is not None
        self._format = fmt
        self._element = fmt.element
        self._floats = torch.empty(0, dtype=torch.float32, device=device)
        self._ints = torch.empty(0, dtype=torch.int32, device=device)

    def quantize(
        self, piece: Piece, matrix: Tensor, tensor_amax: Tensor | None, bits: Tensor | None
    ) -> tuple[Tensor, TileScales]:
        """Return a piece's values (scratch memory, valid until the next call) and scales."""
        source = piece.of(matrix)
        y, ints = self._scratch(piece)
        if source.dtype != torch.float32:
            source = y.copy_(source)
        magnitude = torch.abs(source, out=ints.view(torch.float32))
        scales = tile_scales(tile_amax(magnitude), self._format, tensor_amax)
        torch.mul(source, scales.encode, out=y)
        y.clamp_(-self._element.max_value, self._element.max_value)
        round_in_place(y, self._element, ints, bits)
        return y, scales

    def _scratch(self, piece: Piece) -> tuple[Tensor, Tensor]:
        if self._floats.numel() < piece.numel:
            self._floats = self._floats.new_empty(piece.numel)
            self._ints = self._ints.new_empty(piece.numel)
        shape = (len(piece.tile_rows), piece.tile[0], len(piece.tile_cols), piece.tile[1])
        floats, ints = self._floats[: piece.numel], self._ints[: piece.numel]
        return floats.view(shape), ints.view(shape)


def tile_amax(magnitude: Tensor) -> Tensor:
    """Largest magnitude of each tile: [R, r, C, c] -> [R, 1, C, 1]; NaN where there is a NaN."""
    width = magnitude.shape[3]
    while width % 2 == 0 and 1 < width <= _SHORT_TILE:
        # PyTorch reduces short runs element by element; halving them keeps its vector units busy
        width //= 2
        magnitude = torch.maximum(magnitude[..., :width], magnitude[..., width:])
    if width > 1:
        magnitude = magnitude.amax(3, keepdim=True)
    return magnitude.amax(1, keepdim=True) if magnitude.shape[1] > 1 else magnitude


_SHORT_TILE = 32


def tensor_amax_of(x: Tensor, fmt: Format, given: Tensor | None) -> Tensor | None:
    """The FP32 scalar that E4M3 scales need: `given`, or x's own; None for other scales."""
    if fmt.scale is not ScaleType.E4M3:
        return None
    if given is not None:
        return given.to(device=x.device, dtype=torch.float32)
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    parts = [
        piece.of(matrix).abs().amax()
        for matrix in matrices(x)
        for piece in pieces(_shape(x), (1, 1))
    ]
    return torch.stack(parts).amax().to(torch.float32)


def check(x: Tensor, fmt: Format, block: Block | int, dim: int) -> Block:
    """Return the tile's (rows, cols).

    Raises:
        ValueError: on a dtype, shape, block or format that cannot be quantized.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"quantization takes float32 or bfloat16, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"quantization takes [.., rows, cols], got shape {tuple(x.shape)}")
    if fmt.element is None:
        raise ValueError(f"format '{fmt.name}' is not quantized")
    if isinstance(block, int):
        if dim not in (-1, -2, x.dim() - 1, x.dim() - 2):
            raise ValueError(f"tiles run along one of the last two dims, got dim {dim}")
        block = (1, block) if dim in (-1, x.dim() - 1) else (block, 1)
    if min(block) < 1:
        raise ValueError(f"a tile has at least one row and column, got {block}")
    return block


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[-2], x.shape[-1]


def _count(x: Tensor) -> int:
    return x.shape[:-2].numel()


def matrices(x: Tensor) -> list[Tensor]:
    """Return the [rows, cols] matrices of [.., rows, cols], in order, as views."""
    flat = [x]
    while flat and flat[0].dim() > 2:
        flat = [part for tensor in flat for part in tensor.unbind(0)]
    return flat
