"""What quantization does to the operands of one linear, on a sample of their rows.

Of X, W and G, each in the tiles of the GEMM in `MEASURED_IN`, and for each format:

    |Q(x) - x|^2,  elements that become zero,  elements that saturate,  tiles by log2 of their scale

and of each operand before quantization |x|^2, its largest magnitude, and elements by log2 of their
magnitude. On a tensor-parallel rank the operands are shards, and the sums add over shards.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_snip.collectives import sum_over
from megatron_snip.formats import Block, Format, ScaleType
from megatron_snip.kernels.launch import LOWEST_LOG2, NUM_BINS, NUM_SUMS, SCALE_ROUNDING
from megatron_snip.quantizers.quantize import Prepared, prepare, quantize_dequantize
from megatron_snip.quantizers.reference import (
    amax_of,
    tile_amaxes,
    tile_magnitudes,
    tile_scales,
)
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.statistics.operands import MEASURED_IN, Operands
from megatron_snip.types import Operand

ERROR_SQUARE, ZEROED, SATURATED = range(NUM_SUMS)
"""Error square, elements that became zero, elements that saturated. Of an operand before
quantization: its square, the number of its elements (`RankSums` adds it), 0."""

OPERAND_SUMS = NUM_SUMS + NUM_BINS
"""Sums of one operand in one format: NUM_SUMS, then the bins of its tiles' scales. Of the operand
before quantization: NUM_SUMS, then the bins of its elements."""

HISTOGRAM_STRIDE = 8
"""A histogram counts every eighth column of the sampled rows."""

_CAN_SATURATE = (ScaleType.E4M3, ScaleType.E4M3_TE, ScaleType.DELAYED)
"""Scales that are rounded down, or know only earlier tensors."""


class OperandSums(NamedTuple):
    """What a shard measured; F formats.

    Attributes:
        sums: FP64 [3 operands, F + 1, OPERAND_SUMS], each operand before quantization last; they
            add over shards. Zeros for W where it is not measured.
        amax: FP32 [3] the largest magnitudes of this shard's X, W and G; NaN where an element is
            NaN.
    """

    sums: Tensor
    amax: Tensor

    @classmethod
    def zeros(cls, num_formats: int, device: torch.device) -> Self:
        """Return what a shard adds if it could not measure."""
        shape = (len(Operand), 1 + num_formats, OPERAND_SUMS)
        sums = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(sums, torch.zeros(len(Operand), device=device))

    def summed(self, group: ProcessGroup | None) -> Self:
        """All ranks of `group`: return the sums over the shards."""
        return self._replace(sums=sum_over(self.sums, group))


def operand_sums(
    operands: Operands, formats: Mapping[str, Format], stream: StochasticStream
) -> OperandSums:
    """Measure on this shard.

    Args:
        operands: the shard's tensors.
        formats: what is measured under each name.
        stream: random numbers of G, where a format rounds it stochastically.
    """
    found = OperandSums.zeros(len(formats), operands.input.device)
    for i, operand in enumerate(Operand):
        x = operands.of(operand)
        if x is None:
            continue
        # Converted once here; on a CPU each operation would do it.
        x = x if x.is_cuda else x.float()
        prepared = [
            prepare(
                x, fmt, operand, MEASURED_IN[operand], stream, operands.amax_or_scale(fmt, operand)
            )
            for fmt in formats.values()
        ]
        found.sums[i] = _sums_of(x, prepared)
        found.amax[i] = amax_of(x)
    return found


def _sums_of(x: Tensor, formats: Sequence[Prepared]) -> Tensor:
    """Return the sums of one operand x, FP64 [F + 1, OPERAND_SUMS]."""
    nothing = torch.zeros((), dtype=torch.float64, device=x.device)
    nonzero = x.bool()  # much faster than eq(0)
    amaxes: dict[Block, Tensor] = {}
    heads = []
    scales = []
    for each in formats:
        block = each.block
        if block not in amaxes:
            amaxes[block] = tile_amaxes(x, block)
        encode, decode = tile_scales(amaxes[block], each.fmt, each.amax_or_scale)
        values = quantize_dequantize(
            x,
            each.fmt,
            block,
            stream=each.stream,
            amax_or_scale=each.amax_or_scale,
            scales=(encode, decode),
        )
        zeroed = (nonzero > values.bool()).sum()
        saturated = nothing
        if each.fmt.scale in _CAN_SATURATE:
            assert each.fmt.element is not None
            limit = decode * (each.fmt.element.max_value * SCALE_ROUNDING)
            # A scale that was rounded to 0 makes zeros of its tile: those do not saturate.
            saturated = ((tile_magnitudes(x, block) > limit) & (limit > 0)).sum()
        heads.append(torch.stack([_square(values.sub_(x)), zeroed.double(), saturated.double()]))
        # Tiles of zeros do not count by their scale.
        scales.append(torch.where(amaxes[block] > 0, decode, 0.0))
    heads.append(torch.stack([_square(x), nothing, nothing]))
    bins = _log2_counts([*scales, x[:, ::HISTOGRAM_STRIDE].float().abs()])
    return torch.cat([torch.stack(heads), bins], 1)


def _square(x: Tensor) -> Tensor:
    """Return |x|^2 of a matrix, an FP64 scalar."""
    of_rows: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return of_rows.double().square_().sum()


def _log2_counts(numbers: Sequence[Tensor]) -> Tensor:
    """Return counts of numbers by floor(log2), FP64 [len(numbers), NUM_BINS].

    Zeros, Inf and NaN do not count.
    """
    flat = torch.cat([each.flatten() for each in numbers])
    counted = (flat > 0) & (flat < math.inf)
    # frexp has mantissas in [0.5, 1): its exponent is floor(log2) + 1.
    index = torch.frexp(flat).exponent.sub_(1 + LOWEST_LOG2).clamp_(0, NUM_BINS - 1)
    for i, part in enumerate(torch.split(index, [each.numel() for each in numbers])):
        part.add_(i * NUM_BINS)
    bins = flat.new_zeros(len(numbers) * NUM_BINS, dtype=torch.float64)
    return bins.index_add_(0, index, counted.double()).view(len(numbers), NUM_BINS)
