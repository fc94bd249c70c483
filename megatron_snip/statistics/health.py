"""Low-precision health: what quantization does to each tensor of a linear; docs/glossary.md.

For each operand and format an observed iteration adds up, over the sampled tokens,

    |Q(x) - x|^2,  elements that become zero,  elements that saturate,  tiles by log2 of their scale

`input` and `weight` as fprop quantizes them, `grad_output` as dgrad does. For each operand before
quantization it counts elements by log2 of their magnitude. Sums are scaled to all tokens and add
over shards, microbatches and ranks; amax is a maximum. Experts have rows of their own beside their
linear's.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_snip.config import HealthMeasure
from megatron_snip.formats import Block, Format, ScaleType
from megatron_snip.quantizers.reference import (
    amax_of,
    tile_amaxes,
    tile_magnitudes,
    tile_scales,
)
from megatron_snip.statistics.health_table import (
    SMALL_IS_BAD,
    HealthTable,
    LinearHealth,
    OperandHealth,
)
from megatron_snip.statistics.records import LinearStatistics, StatisticsTable
from megatron_snip.statistics.rows import (
    ERROR_SUMS,
    NUM_BINS,
    OPERAND_SUMS,
    ExpertSums,
    LinearSums,
)
from megatron_snip.types import Gemm, Operand

LOWEST_LOG2 = -96
"""Scales and magnitudes are counted by floor(log2(x)) in NUM_BINS bins, from this on, so to 31;
smaller ones count in the first bin, larger ones in the last."""

HISTOGRAM_STRIDE = 8
"""A histogram counts every eighth feature of the sampled tokens, and of W every eighth row too."""

_CAN_SATURATE = (ScaleType.E4M3, ScaleType.E4M3_TE, ScaleType.DELAYED)
"""Scales that are rounded down, or know only earlier tensors."""

_SCALE_ROUNDING = 1 + 2.0**-20
"""An element counts as saturated beyond its tile's largest value times this: the rounding of a
scale alone is no saturation."""


class Tiles(NamedTuple):
    """How an operand is quantized.

    Attributes:
        operand: which of X, W and G.
        fmt: the format that it takes (`operand_format`).
        block: (rows, cols) of a tile.
    """

    operand: Operand
    fmt: Format
    block: Block


class HealthSums:
    """Counts what quantization does to operands of one linear, format by format.

    Formats with the same tiles share what depends on the tensor alone.
    """

    def __init__(self, *operands: Operand) -> None:
        """Start with nothing counted of these operands, O of them."""
        self._operands = operands
        self._amaxes: dict[tuple[Operand, Block], Tensor] = {}
        self._nonzero: dict[Operand, Tensor] = {}
        self._scales: list[tuple[Tensor, Tensor]] = []
        self._zeroed: list[Tensor] = []
        self._saturated: list[Tensor | None] = []

    def scales(
        self, x: Tensor, tiles: Tiles, tensor_number: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what `tile_scales` returns for an operand x [rows, cols]."""
        key = tiles.operand, tiles.block
        if key not in self._amaxes:
            self._amaxes[key] = tile_amaxes(x, tiles.block)
        return tile_scales(self._amaxes[key], tiles.fmt, tensor_number)

    def count(self, x: Tensor, quantized: Tensor, tiles: Tiles, scale: Tensor) -> None:
        """Count elements that become zero or saturate, and tiles by their scale.

        Call it for the operands of each format in turn. Tiles of zeros and tiles with NaN or Inf do
        not count.

        Args:
            x: what `scales` got.
            quantized: Q(x), dequantized.
            tiles: what `scales` got.
            scale: the second of `scales`.
        """
        operand, fmt, block = tiles
        assert fmt.element is not None
        if operand not in self._nonzero:
            self._nonzero[operand] = x.bool()  # much faster than eq(0)
        self._zeroed.append(torch.count_nonzero(self._nonzero[operand] > quantized.bool()))
        if fmt.scale in _CAN_SATURATE:
            limit = scale * (fmt.element.max_value * _SCALE_ROUNDING)
            self._saturated.append((tile_magnitudes(x, block) > limit).sum())
        else:
            self._saturated.append(None)
        self._scales.append((scale, self._amaxes[operand, block]))

    def sums(self, errors: Tensor, tensors: Iterable[Tensor]) -> Tensor:
        """Return the operands' part of `LinearSums.health`, [1 + F, O, OPERAND_SUMS], FP32.

        Args:
            errors: |Q(x) - x|^2, FP32 [F O], in the order of `count`.
            tensors: the operands.
        """
        pairs = zip(tensors, self._operands, strict=True)
        parts = [_histogram_part(x, operand) for x, operand in pairs]
        bins = _log2_counts([*self._scales, *((part, part) for part in parts)])
        zeroed = torch.stack(self._zeroed).float()
        saturated = torch.zeros_like(errors)
        for i, number in enumerate(self._saturated):
            if number is not None:
                saturated[i] = number
        by_format = torch.stack([errors, zeroed, saturated], 1)
        count = len(self._operands)
        heads = torch.cat([by_format, by_format.new_zeros((count, ERROR_SUMS))])
        return torch.cat([heads, bins], 1).view(-1, count, OPERAND_SUMS)

    def amax(self) -> Tensor:
        """Return the operands' largest magnitudes, FP32 [O]; Inf if one is not finite."""
        # The amaxes of any tiles will do.
        amaxes = {operand: amax for (operand, _), amax in self._amaxes.items()}
        found = torch.stack([amax_of(amaxes[operand]) for operand in self._operands])
        return found.nan_to_num_(nan=math.inf, posinf=math.inf)


def _histogram_part(x: Tensor, operand: Operand) -> Tensor:
    """Return the magnitudes, FP32, of the elements of a matrix that its histogram counts."""
    rows = HISTOGRAM_STRIDE if operand is Operand.WEIGHT else 1
    return x[::rows, ::HISTOGRAM_STRIDE].float().abs()


def _log2_counts(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return counts of numbers by floor(log2), FP32 [pairs, NUM_BINS]; Inf and NaN do not count.

    Args:
        pairs: (numbers, magnitudes of the same shape): a number counts if its magnitude is
            positive. A tile's scale counts if its amax is; an element if it is itself.
    """
    numbers = torch.cat([number.flatten() for number, _ in pairs])
    magnitudes = torch.cat([magnitude.flatten() for _, magnitude in pairs])
    counted = (magnitudes > 0) & (numbers < math.inf)
    # frexp has mantissas in [0.5, 1): its exponent is floor(log2) + 1.
    index = torch.frexp(numbers).exponent.sub_(1 + LOWEST_LOG2).clamp_(0, NUM_BINS - 1)
    sizes = [number.numel() for number, _ in pairs]
    for i, part in enumerate(torch.split(index, sizes)):
        part.add_(i * NUM_BINS)
    bins = numbers.new_zeros(len(pairs) * NUM_BINS, dtype=torch.float32)
    return bins.index_add_(0, index, counted.float()).view(len(pairs), NUM_BINS)


class _OperandScale(NamedTuple):
    """What relates an operand's sums to its health.

    Attributes:
        size: Number of elements that the sums stand for.
        square: Sum of squares of these elements.
        times_counted: How often each element was counted.
        unit: Factor from the tensor as the linear sees it to the tensor's unit in the table: of G,
            the gradient of the batch-mean loss.
    """

    size: float
    square: float
    times_counted: float
    unit: float

    @property
    def shift(self) -> float:
        """What the unit adds to log2 of the tensor's numbers."""
        return math.log2(self.unit)


def _linear_health(
    s: LinearStatistics, sums: LinearSums, amax: list[float], experts: ExpertSums, grad_scale: float
) -> LinearHealth:
    """Return the health of one linear; `make_health_table` explains the arguments."""
    num_weights = s.in_features * s.out_features
    scales = {
        Operand.INPUT: _OperandScale(s.tokens * s.in_features, s.input_square, 1.0, 1.0),
        # W is observed once in each microbatch.
        Operand.WEIGHT: _OperandScale(num_weights, s.weight_square, s.microbatches, 1.0),
        Operand.GRAD_OUTPUT: _OperandScale(
            s.tokens * s.out_features, s.grad_square, 1.0, grad_scale
        ),
    }
    operands: dict[str, dict[Operand, OperandHealth]] = {name: {} for name in s.formats}
    histograms: dict[Operand, tuple[float, list[float]]] = {}
    largest: dict[Operand, float | None] = {}
    worst = _worst_experts(experts, s)
    # The operands before quantization come after the last format.
    *by_format, unquantized = sums.health.tolist()
    for o, operand in enumerate(Operand):
        scale = scales[operand]
        largest[operand] = amax[o] * scale.unit if math.isfinite(amax[o]) else None
        histogram = _trimmed(unquantized[o][-NUM_BINS:], scale.shift)
        if histogram is not None:
            histograms[operand] = histogram
        for f, name in enumerate(s.formats):
            worst_expert = {}
            for measure, (which, values) in worst.items():
                if math.isfinite(values[f][o]):
                    worst_expert[measure] = (which[f][o], values[f][o])
            operands[name][operand] = _operand_health(by_format[f][o], scale, worst_expert)

    gemms = {}
    for name, errors in s.formats.items():
        gemms[name] = {
            Gemm.FPROP: _db(s.output_square, errors.output_error_square),
            Gemm.DGRAD: _db(s.input_grad_square, errors.input_grad_error_square),
            Gemm.WGRAD: _db(s.wgrad_square, errors.wgrad_error_square),
        }
    grad, weight, update = sums.norms.tolist()
    return LinearHealth(
        name=s.name,
        stage=s.stage,
        gradient_norm=math.sqrt(grad) if grad > 0 and math.isfinite(grad) else None,
        update_ratio=math.sqrt(update / weight) if update > 0 and 0 < weight < math.inf else None,
        amax=largest,
        operands=operands,
        gemm_sqnr_db=gemms,
        histograms=histograms,
    )


def _operand_health(
    numbers: Sequence[float],
    scale: _OperandScale,
    worst_expert: dict[HealthMeasure, tuple[int, float]],
) -> OperandHealth:
    """Return the health of an operand in one format from its OPERAND_SUMS numbers."""
    error, zeros, saturated = (number / scale.times_counted for number in numbers[:ERROR_SUMS])
    return OperandHealth(
        sqnr_db=_db(scale.square, error * scale.unit**2),
        underflow=zeros / scale.size if scale.size else None,
        saturated=saturated / scale.size if scale.size else None,
        scale_log2=_spread(numbers[ERROR_SUMS:], scale.shift),
        worst_expert=worst_expert,
    )


def _worst_experts(
    experts: ExpertSums, s: LinearStatistics
) -> dict[HealthMeasure, tuple[Any, Any]]:
    """Return (worst expert, its value) by measure; both are lists [formats][operands]."""
    if not len(experts.statistics):
        return {}
    microbatches, tokens, *squares = experts.statistics.unbind(1)
    weights = microbatches * s.in_features * s.out_features
    sizes = torch.stack([tokens * s.in_features, weights, tokens * s.out_features], 1)[:, None]
    error, zeros, _ = experts.errors.unbind(-1)  # [experts, formats, operands]
    sqnr = 10 * torch.log10(torch.stack(squares, 1)[:, None] / error)
    measured: dict[HealthMeasure, Tensor] = {"sqnr_db": sqnr, "underflow": zeros / sizes}
    found: dict[HealthMeasure, tuple[Any, Any]] = {}
    for measure, values in measured.items():
        sign = -1 if measure in SMALL_IS_BAD else 1  # the worst is the largest of sign * value
        worst = (sign * values).masked_fill(~values.isfinite(), -math.inf).max(0)
        found[measure] = (worst.indices.tolist(), (sign * worst.values).tolist())
    return found


def make_health_table(
    table: StatisticsTable,
    sums: LinearSums,
    amax: Tensor,
    experts: Sequence[ExpertSums],
    grad_scale: float,
) -> HealthTable:
    """Return the health of the observed linears.

    Args:
        table: The statistics of the linears.
        sums: The sums of all linears over all ranks, one row for each.
        amax: The largest magnitudes of X, W and G of each linear over all ranks.
        experts: The sums of each linear's experts, one row for each; no rows for other linears.
        grad_scale: Factor from G as the linear sees it to the gradient of the batch-mean loss.
    """
    linears = []
    for i, statistics in enumerate(table.linears):
        if not statistics.microbatches:
            continue
        of_linear = LinearSums(sums.statistics[i], sums.norms[i], sums.health[i])
        largest = amax[i].tolist()
        linears.append(_linear_health(statistics, of_linear, largest, experts[i], grad_scale))
    return HealthTable(table.iteration, tuple(linears))


def _db(signal: float, error: float) -> float | None:
    """Return the ratio in dB; None if it is 0, infinite or NaN."""
    ratio = signal / error if error > 0 else math.inf
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def _trimmed(bins: Sequence[float], shift: float) -> tuple[float, list[float]] | None:
    """Return log2 of the first bin that is not empty, and the shares from there to the last one."""
    total = sum(bins)
    if not 0 < total < math.inf:
        return None
    filled = [i for i, count in enumerate(bins) if count]
    shares = [count / total for count in bins[filled[0] : filled[-1] + 1]]
    return filled[0] + LOWEST_LOG2 + shift, shares


def _spread(bins: Sequence[float], shift: float) -> tuple[float, float, float] | None:
    """Return least, median and largest log2."""
    histogram = _trimmed(bins, shift)
    if histogram is None:
        return None
    low, shares = histogram
    middle = next(i for i, below in enumerate(accumulate(shares)) if below >= 0.5 - 1e-9)
    return low, low + middle, low + len(shares) - 1
