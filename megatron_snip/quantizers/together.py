"""Several operands quantized to one format in few operations, to the bits of one call for each.

To start an operation takes longer than what it does to a small tensor. So the scales of all
operands are computed at once, and on a CPU small operands are rounded in one buffer.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.kernels import launch
from megatron_snip.quantizers import reference
from megatron_snip.quantizers.quantize import Prepared, prepare, quantize_dequantize
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
    matrices = [
        prepare(each.x, fmt, each.operand, each.gemm, each.stream, each.amax_or_scale)
        for each in operands
    ]
    # Gradients may have an element type of their own, and so another format.
    places: dict[Format, list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        places[matrix.fmt].append(i)
    found: dict[int, Quantized] = {}
    for own_fmt, of_format in places.items():
        amaxes = [operands[i].amaxes for i in of_format]
        quantized = _quantize([matrices[i] for i in of_format], amaxes, own_fmt)
        found |= zip(of_format, quantized, strict=True)
    return [found[i] for i in range(len(operands))]


def _quantize(
    matrices: Sequence[Prepared], amaxes: Sequence[Tensor], fmt: Format
) -> list[Quantized]:
    """Return matrices quantized to one format.

    Args:
        matrices: the matrices.
        amaxes: the largest magnitudes of their tiles.
        fmt: the format.
    """
    scales = _scales(matrices, amaxes, fmt)
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


def _scales(
    matrices: Sequence[Prepared], amaxes: Sequence[Tensor], fmt: Format
) -> list[tuple[Tensor, Tensor]]:
    """Return (encode, decode) of each matrix, as `reference.tile_scales` does."""
    flat = torch.cat([each.flatten() for each in amaxes])
    amax_or_scale = None
    if fmt.needs_amax_or_scale:
        given = [m.amax_or_scale for m in matrices if m.amax_or_scale is not None]
        amax_or_scale = torch.cat(
            [each.expand(own.numel()) for each, own in zip(given, amaxes, strict=True)]
        )
    encodes, decodes = (
        _parts(scale, [each.shape for each in amaxes])
        for scale in reference.tile_scales(flat, fmt, amax_or_scale)
    )
    return list(zip(encodes, decodes, strict=True))


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the tensors of these shapes that stand one behind the other in `flat`; views."""
    parts = flat.split_with_sizes([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _quantize_alone(matrix: Prepared, scales: tuple[Tensor, Tensor], fmt: Format) -> Tensor:
    """Return one matrix quantized and dequantized."""
    return quantize_dequantize(
        matrix.x,
        fmt,
        matrix.block,
        stream=matrix.stream,
        amax_or_scale=matrix.amax_or_scale,
        scales=scales,
    )


def _is_small(matrix: Prepared) -> bool:
    """Return whether a matrix is small and has complete tiles only."""
    rows, cols = matrix.x.shape
    tall, wide = matrix.block
    return rows * cols <= SMALL and rows % tall == 0 and cols % wide == 0


def _quantize_in_one_buffer(
    matrices: Sequence[Prepared], scales: Sequence[tuple[Tensor, Tensor]], fmt: Format
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
