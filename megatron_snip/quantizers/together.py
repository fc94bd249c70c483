"""Several operands quantized to one format in few operations, to the bits of one call for each.

To start an operation takes longer than what it does to a small tensor. So the scales of all
operands are computed at once, and on a CPU small operands are rounded in one buffer.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Block, Format
from megatron_snip.kernels import launch
from megatron_snip.quantizers import reference
from megatron_snip.quantizers.quantize import (
    operand_block,
    operand_format,
    quantize_dequantize,
    stream_of,
)
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.types import Gemm, Operand

SMALL = 1 << 16
"""Elements that a small matrix has at most: operations on it take about as long as starting them,
and some of them together fit into a cache."""


class GemmOperand(NamedTuple):
    """An operand of a GEMM, as it is quantized.

    Attributes:
        x: [rows, cols], BF16 or FP32; for wgrad what `rotated` returns.
        operand: which of X, W and G it is.
        gemm: what it enters.
        amaxes: what `reference.tile_amaxes` returns for x.
        stream: its random numbers, needed where the format rounds it stochastically.
        amax_or_scale: as in `quantize_dequantize_operand`.
    """

    x: Tensor
    operand: Operand
    gemm: Gemm
    amaxes: Tensor
    stream: StochasticStream | None = None
    amax_or_scale: Tensor | None = None


class Quantized(NamedTuple):
    """A quantized operand.

    Attributes:
        values: what the GEMM sees, FP32 [rows, cols].
        decode: the factors that its tiles were dequantized by, FP32 in the shape of `amaxes`.
    """

    values: Tensor
    decode: Tensor


@torch.no_grad()
def quantize_dequantize_operands(operands: Sequence[GemmOperand], fmt: Format) -> list[Quantized]:
    """Return what GEMMs see of each operand; `quantize_dequantize_operand` gives the same bits.

    Args:
        operands: what is quantized, all on one device.
        fmt: a quantized format, which all of them take.

    Raises:
        ValueError: as `quantize_dequantize_operand` does.
    """
    # Gradients may have an element type of their own, and so another format.
    places: dict[Format, list[int]] = defaultdict(list)
    for i, each in enumerate(operands):
        places[operand_format(fmt, each.operand)].append(i)
    found: dict[int, Quantized] = {}
    for operand_fmt, of_format in places.items():
        matrices = [_matrix(operands[i], operand_fmt) for i in of_format]
        found |= zip(of_format, _quantize(matrices, operand_fmt), strict=True)
    return [found[i] for i in range(len(operands))]


class _Matrix(NamedTuple):
    """A matrix and how it is quantized.

    Attributes:
        x: [rows, cols].
        block: (rows, cols) of a tile.
        amaxes: the largest magnitudes of its tiles.
        stream: None rounds to nearest.
        amax_or_scale: None if the format needs none.
    """

    x: Tensor
    block: Block
    amaxes: Tensor
    stream: StochasticStream | None
    amax_or_scale: Tensor | None


def _matrix(each: GemmOperand, fmt: Format) -> _Matrix:
    """Return how an operand is quantized to its format."""
    block = operand_block(fmt, each.operand, each.gemm)
    reference.check(each.x, fmt, block)
    stream = stream_of(fmt, each.operand, each.gemm, each.stream)
    amax_or_scale = reference.amax_or_scale_of(each.x, each.amax_or_scale, fmt)
    return _Matrix(each.x, block, each.amaxes, stream, amax_or_scale)


def _quantize(matrices: Sequence[_Matrix], fmt: Format) -> list[Quantized]:
    """Return matrices quantized to one format."""
    scales = _scales(matrices, fmt)
    has_kernels = launch.use_kernels(matrices[0].x.device, *(m.block for m in matrices))
    small = [i for i, m in enumerate(matrices) if not has_kernels and _is_small(m)]
    values: dict[int, Tensor] = {}
    if small:
        together = _quantize_in_one_buffer(
            [matrices[i] for i in small], [scales[i] for i in small], fmt
        )
        values |= zip(small, together, strict=True)
    for i, (matrix, own_scales) in enumerate(zip(matrices, scales, strict=True)):
        if i not in values:
            values[i] = _quantize_alone(matrix, own_scales, fmt)
    return [Quantized(values[i], decode) for i, (_, decode) in enumerate(scales)]


def _scales(matrices: Sequence[_Matrix], fmt: Format) -> list[tuple[Tensor, Tensor]]:
    """Return (encode, decode) of each matrix, as `reference.tile_scales` does."""
    flat = torch.cat([m.amaxes.flatten() for m in matrices])
    amax_or_scale = None
    if fmt.needs_amax_or_scale:
        given = [m.amax_or_scale for m in matrices if m.amax_or_scale is not None]
        amax_or_scale = torch.cat(
            [each.expand(m.amaxes.numel()) for each, m in zip(given, matrices, strict=True)]
        )
    encodes, decodes = (
        _parts(scale, [m.amaxes.shape for m in matrices])
        for scale in reference.tile_scales(flat, fmt, amax_or_scale)
    )
    return list(zip(encodes, decodes, strict=True))


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the tensors of these shapes that stand one behind the other in `flat`; views."""
    parts = flat.split_with_sizes([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _quantize_alone(matrix: _Matrix, scales: tuple[Tensor, Tensor], fmt: Format) -> Tensor:
    """Return one matrix quantized and dequantized."""
    return quantize_dequantize(
        matrix.x,
        fmt,
        matrix.block,
        stream=matrix.stream,
        amax_or_scale=matrix.amax_or_scale,
        scales=scales,
    )


def _is_small(matrix: _Matrix) -> bool:
    """Return whether a matrix is small and has complete tiles only."""
    rows, cols = matrix.x.shape
    tall, wide = matrix.block
    return rows * cols <= SMALL and rows % tall == 0 and cols % wide == 0


def _quantize_in_one_buffer(
    matrices: Sequence[_Matrix], scales: Sequence[tuple[Tensor, Tensor]], fmt: Format
) -> list[Tensor]:
    """Return what `_quantize_alone` does for each matrix; the results share memory.

    Args:
        matrices: have complete tiles only.
        scales: what `_scales` returns for them.
        fmt: the format.
    """
    element = fmt.element
    assert element is not None
    # Those that are rounded to nearest stand before those that are rounded stochastically.
    order = sorted(range(len(matrices)), key=lambda i: matrices[i].stream is not None)
    shapes = [matrices[i].x.shape for i in order]
    size = sum(shape.numel() for shape in shapes)
    buffer = torch.empty(size, device=matrices[0].x.device)
    scratch = torch.empty_like(buffer, dtype=torch.int32)
    values = dict(zip(order, _parts(buffer, shapes), strict=True))

    for i, matrix in enumerate(matrices):
        source = reference.tiles(matrix.x, matrix.block)
        scaled = reference.tiles(values[i], matrix.block)
        reference.multiply_tiles(source, scales[i][0], out=scaled)
    if fmt.needs_amax_or_scale:
        buffer.clamp_(-element.max_value, element.max_value)

    num_nearest = sum(m.x.numel() for m in matrices if m.stream is None)
    if num_nearest:
        reference.round_in_place(buffer[:num_nearest], element, scratch[:num_nearest])
    if num_nearest < size:
        bits16 = [
            m.stream.bits16(m.x.shape[0], m.x.shape[1], m.x.device).flatten()
            for m in matrices
            if m.stream is not None
        ]
        rest = slice(num_nearest, None)
        reference.round_in_place(buffer[rest], element, scratch[rest], torch.cat(bits16))

    for i, matrix in enumerate(matrices):
        tiles = reference.tiles(values[i], matrix.block)
        reference.multiply_tiles(tiles, scales[i][1], out=tiles)
    return [values[i] for i in range(len(matrices))]
