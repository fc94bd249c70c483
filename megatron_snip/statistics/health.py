"""Low-precision health: what quantization does to each tensor of a linear; docs/glossary.md.

For each operand and format an observed iteration adds up, over the sampled tokens,

    |Q(x) - x|^2,  elements that become zero,  elements that saturate,  tiles by log2 of their scale

`input` and `weight` as fprop quantizes them, `grad_output` as dgrad does, of the tokens that dgrad
is measured on. Of each operand before quantization it adds up |x|^2 and the elements, and counts
elements by log2 of their magnitude. Sums are scaled to all tokens of the measured microbatches, and
add over shards, microbatches and ranks; amax is a maximum. Experts have rows of their own beside
their linear's.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_snip.alert_thresholds import HealthMeasure
from megatron_snip.formats import Format, ScaleType
from megatron_snip.kernels.launch import LOWEST_LOG2, NUM_BINS, SCALE_ROUNDING
from megatron_snip.quantizers.quantize import operand_block, operand_format
from megatron_snip.quantizers.reference import amax_of, tile_magnitudes
from megatron_snip.quantizers.together import GemmOperand, Quantized
from megatron_snip.statistics.health_table import (
    SMALL_IS_BAD,
    HealthTable,
    LinearHealth,
    OperandHealth,
)
from megatron_snip.statistics.records import (
    LinearStatistics,
    StatisticsTable,
    has_products,
)
from megatron_snip.statistics.rows import (
    ERROR_SQUARE,
    ERROR_SUMS,
    OPERAND_SUMS,
    SATURATED,
    ZEROED,
    LinearSums,
)
from megatron_snip.statistics.sample import constant
from megatron_snip.types import Gemm, Operand

HISTOGRAM_STRIDE = 8
"""A histogram counts every eighth feature of the sampled tokens, and every eighth column of W."""

WEIGHT_STRIDE = 8
"""Elements of W are counted, by magnitude or because they became zero, on every eighth row."""

_CAN_SATURATE = (ScaleType.E4M3, ScaleType.E4M3_TE, ScaleType.DELAYED)
"""Scales that are rounded down, or know only earlier tensors."""


class OperandCounts:
    """Counts what quantization does to one operand of a linear, format by format.

    Attributes:
        operand: which of X, W and G it is.
        zeroed: for each format, how many elements became zero; of W an estimate, from the rows that
            are counted.
        saturated: for each format, how many elements saturated; None where none can.
        scales: for each format, (decode scales of the tiles, their largest magnitudes).
    """

    def __init__(self, operand: Operand) -> None:
        """Start with nothing counted."""
        self.operand = operand
        self.zeroed: list[Tensor] = []
        self.saturated: list[Tensor | None] = []
        self.scales: list[tuple[Tensor, Tensor]] = []
        self._row_stride = WEIGHT_STRIDE if operand is Operand.WEIGHT else 1
        self._original: GemmOperand | None = None

    def add(self, original: GemmOperand, fmt: Format, quantized: Quantized) -> None:
        """Count elements that become zero or saturate in one more format.

        Args:
            original: the operand; the same tensor in every format.
            fmt: what it was quantized to.
            quantized: what became of it.
        """
        if self._original is None:
            self._original = original
        element = operand_format(fmt, self.operand).element
        assert element is not None
        became_zero = self._nonzero > quantized.values[:: self._row_stride].bool()
        number = became_zero.sum(dtype=torch.int32)  # faster than count_nonzero
        if self._row_stride > 1:
            number = number * (self.num_elements / became_zero.numel())
        self.zeroed.append(number)
        saturated = None
        if fmt.scale in _CAN_SATURATE:
            limit = quantized.decode * (element.max_value * SCALE_ROUNDING)
            block = operand_block(fmt, self.operand, original.gemm)
            # A scale that was rounded to 0 makes zeros of its tile: those do not saturate.
            beyond = (tile_magnitudes(original.x, block) > limit) & (limit > 0)
            saturated = beyond.sum()
        self.saturated.append(saturated)
        self.scales.append((quantized.decode, original.amaxes))

    @cached_property
    def _nonzero(self) -> Tensor:
        """Where the counted rows are not zero."""
        assert self._original is not None
        return self._original.x[:: self._row_stride].bool()  # much faster than eq(0)

    @property
    def num_elements(self) -> int:
        """Number of the operand's elements; after `add`."""
        assert self._original is not None
        return self._original.x.numel()

    @cached_property
    def magnitudes(self) -> Tensor:
        """The magnitudes of the elements that the operand's histogram counts, FP32; after `add`."""
        assert self._original is not None
        return self._original.x[:: self._row_stride, ::HISTOGRAM_STRIDE].float().abs()

    @cached_property
    def amax(self) -> Tensor:
        """The largest magnitude, an FP32 scalar; NaN if an element is NaN; after `add`."""
        assert self._original is not None
        return amax_of(self._original.amaxes)


def health_sums(counts: Sequence[OperandCounts], squares: Tensor) -> Tensor:
    """Return `LinearSums.health` of O operands in F formats, FP32 [1 + F, O, OPERAND_SUMS].

    Tiles of zeros, tiles with NaN or Inf, and tiles whose scale was rounded to 0 do not count by
    their scale.

    Args:
        counts: those of each operand.
        squares: |Q(x) - x|^2 in each format, then |x|^2, FP32 [1 + F, O].
    """
    num_formats = len(squares) - 1
    by_format = [(each, f) for f in range(num_formats) for each in counts]
    scales = [each.scales[f] for each, f in by_format]
    bins = _log2_counts([*scales, *((each.magnitudes, each.magnitudes) for each in counts)])
    # The operands before quantization come after the last format.
    num_elements = constant(squares.device, tuple(each.num_elements for each in counts))
    zeroed = torch.stack([each.zeroed[f] for each, f in by_format])
    heads = torch.zeros((len(bins), ERROR_SUMS), device=squares.device)
    heads[:, ERROR_SQUARE] = squares.flatten()
    heads[:, ZEROED] = torch.cat([zeroed, num_elements])
    for i, (each, f) in enumerate(by_format):
        number = each.saturated[f]
        if number is not None:
            heads[i, SATURATED] = number
    return torch.cat([heads, bins], 1).view(*squares.shape, OPERAND_SUMS)


def _log2_counts(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return counts of numbers by floor(log2), FP32 [pairs, NUM_BINS].

    Zeros, Inf and NaN do not count.

    Args:
        pairs: (numbers, magnitudes of the same shape): a number counts if its magnitude is
            positive. A tile's scale counts if its amax is; an element if it is itself.
    """
    numbers = torch.cat([number.flatten() for number, _ in pairs])
    magnitudes = torch.cat([magnitude.flatten() for _, magnitude in pairs])
    counted = (magnitudes > 0) & (numbers > 0) & (numbers < math.inf)
    # frexp has mantissas in [0.5, 1): its exponent is floor(log2) + 1.
    index = torch.frexp(numbers).exponent.sub_(1 + LOWEST_LOG2).clamp_(0, NUM_BINS - 1)
    sizes = [number.numel() for number, _ in pairs]
    for i, part in enumerate(torch.split(index, sizes)):
        part.add_(i * NUM_BINS)
    bins = numbers.new_zeros(len(pairs) * NUM_BINS, dtype=torch.float32)
    return bins.index_add_(0, index, counted.float()).view(len(pairs), NUM_BINS)


def _linear_health(
    s: LinearStatistics,
    sums: LinearSums,
    ends: list[list[list[int]]],
    amax: list[float],
    experts: Tensor,
    grad_scale: float,
) -> LinearHealth:
    """Return the health of one linear.

    Args:
        s: Its statistics.
        sums: Its sums.
        ends: What `_ends` returns for the histograms of `sums.health`.
        amax: See `make_health_table`, as the next two.
        experts: Of this linear.
        grad_scale: The same for all.
    """
    # Factors from each tensor as the linear sees it to its unit in the table.
    units = {Operand.INPUT: 1.0, Operand.WEIGHT: 1.0, Operand.GRAD_OUTPUT: grad_scale}
    operands: dict[str, dict[Operand, OperandHealth]] = {name: {} for name in s.formats}
    histograms: dict[Operand, tuple[float, list[float]]] = {}
    largest: dict[Operand, float | None] = {}
    worst = _worst_experts(experts)
    *by_format, originals = sums.health.tolist()
    for o, (operand, unit) in enumerate(units.items()):
        shift = math.log2(unit)
        largest[operand] = amax[o] * unit if math.isfinite(amax[o]) else None
        histogram = _histogram(originals[o][ERROR_SUMS:], ends[-1][o], shift)
        if histogram is not None:
            histograms[operand] = histogram
        for f, name in enumerate(s.formats):
            worst_expert = {}
            for measure, (which, values) in worst.items():
                if math.isfinite(values[f][o]):
                    worst_expert[measure] = (which[f][o], values[f][o])
            operands[name][operand] = _operand_health(
                by_format[f][o], originals[o], _spread(ends[f][o], shift), worst_expert
            )

    gemms = {}
    for name, errors in s.formats.items():
        gemms[name] = {
            Gemm.FPROP: _db(s.output_square, errors.output_error_square),
            Gemm.DGRAD: _db(s.input_grad_square, errors.input_grad_error_square),
            Gemm.WGRAD: _db(s.wgrad_square, errors.wgrad_error_square),
        }
    grad, step, num_gradients = sums.norms.tolist()
    gradient_norm = math.sqrt(grad) if num_gradients and math.isfinite(grad) else None
    gradient_noise = {
        name: _gradient_noise(_wgrad_error_square(s, name), gradient_norm) for name in s.formats
    }
    weight = s.weight_square * max(1, len(experts))  # it is the mean over experts
    return LinearHealth(
        name=s.name,
        stage=s.stage,
        gradient_norm=gradient_norm,
        update_ratio=math.sqrt(step / weight) if step > 0 and 0 < weight < math.inf else None,
        amax=largest,
        operands=operands,
        gemm_sqnr_db=gemms,
        histograms=histograms,
        gradient_noise=gradient_noise,
    )


def _wgrad_error_square(s: LinearStatistics, name: str) -> float:
    """Return |eW|^2 in a format: measured, or where norms alone are measured an estimate.

    The estimate takes the errors of all elements for independent. In small runs what is measured is
    0.7 to 1.3 times the estimate.
    """
    errors = s.formats[name]
    if has_products([s]):
        return errors.wgrad_error_square
    of_grad = errors.grad_error_square * s.input_square
    of_input = errors.input_error_square * s.grad_square
    return (of_grad + of_input) / s.tokens if s.tokens else math.nan


def _gradient_noise(error_square: float, gradient_norm: float | None) -> float | None:
    """Return sqrt(3) |eW| / |dL/dW|; None if it is infinite, NaN, or there is no gradient."""
    if not gradient_norm or not 0 <= error_square < math.inf:
        return None
    # Errors of different microbatches are nearly independent, so their squares add up.
    return math.sqrt(3 * error_square) / gradient_norm


def _operand_health(
    numbers: Sequence[float],
    original: Sequence[float],
    scale_log2: tuple[float, float, float] | None,
    worst_expert: dict[HealthMeasure, tuple[int, float]],
) -> OperandHealth:
    """Return the health of an operand in one format.

    Args:
        numbers: Its OPERAND_SUMS numbers in the format.
        original: Those of the operand before quantization.
        scale_log2: Least, median and largest log2 of its tiles' scales.
        worst_expert: The operand's worst experts in the format.
    """
    error, zeros, saturated = numbers[:ERROR_SUMS]
    square, num_elements = original[:2]
    return OperandHealth(
        sqnr_db=_db(square, error),
        underflow=zeros / num_elements if num_elements else None,
        saturated=saturated / num_elements if num_elements else None,
        scale_log2=scale_log2,
        worst_expert=worst_expert,
    )


def _worst_experts(experts: Tensor) -> dict[HealthMeasure, tuple[Any, Any]]:
    """Return (worst expert, its value) by measure; both are lists [formats][operands]."""
    if not len(experts):
        return {}
    by_format = experts[:, :-1]  # [experts, formats, operands, ERROR_SUMS]
    originals = experts[:, -1:]
    sqnr = 10 * torch.log10(originals[..., ERROR_SQUARE] / by_format[..., ERROR_SQUARE])
    underflow = by_format[..., ZEROED] / originals[..., ZEROED]
    measured: dict[HealthMeasure, Tensor] = {"sqnr_db": sqnr, "underflow": underflow}
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
    experts: Sequence[Tensor],
    grad_scale: float,
) -> HealthTable:
    """Return the health of the observed linears.

    Args:
        table: The statistics of the linears.
        sums: The sums of all linears over all ranks, one row for each.
        amax: The largest magnitudes of X, W and G of each linear over all ranks.
        experts: What `RowLayout.split_experts` returns for each linear; no rows for linears without
            experts.
        grad_scale: Factor from G as the linear sees it to the gradient of the batch-mean loss.
    """
    ends = _ends(sums.health[..., ERROR_SUMS:]).tolist()
    linears = []
    for i, statistics in enumerate(table.linears):
        if not statistics.microbatches:
            continue
        of_linear = LinearSums(sums.statistics[i], sums.norms[i], sums.health[i])
        largest = amax[i].tolist()
        linears.append(
            _linear_health(statistics, of_linear, ends[i], largest, experts[i], grad_scale)
        )
    return HealthTable(table.iteration, tuple(linears))


def _db(signal: float, error: float) -> float | None:
    """Return the ratio in dB; None if it is 0, infinite or NaN."""
    ratio = signal / error if error > 0 else math.inf
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def _ends(bins: Tensor) -> Tensor:
    """Return where histograms begin, have their median, and end.

    Args:
        bins: [.., NUM_BINS] counts.

    Returns:
        int64 [.., 3] Indices of bins; -1 where a histogram is empty or not finite.
    """
    total = bins.sum(-1, keepdim=True)
    occupied = (bins != 0).int()  # `argmax` finds the first of the largest
    first = occupied.argmax(-1)
    median = (bins.cumsum(-1) >= (0.5 - 1e-9) * total).int().argmax(-1)
    last = NUM_BINS - 1 - occupied.flip(-1).argmax(-1)
    is_known = (total > 0) & (total < math.inf)
    return torch.stack([first, median, last], -1).masked_fill(~is_known, -1)


def _histogram(
    bins: Sequence[float], ends: Sequence[int], shift: float
) -> tuple[float, list[float]] | None:
    """Return log2 of the first bin that is not empty, and the shares from there to the last one."""
    first, _, last = ends
    if first < 0:
        return None
    total = sum(bins)
    return first + LOWEST_LOG2 + shift, [count / total for count in bins[first : last + 1]]


def _spread(ends: Sequence[int], shift: float) -> tuple[float, float, float] | None:
    """Return least, median and largest log2."""
    if ends[0] < 0:
        return None
    first, median, last = (index + LOWEST_LOG2 + shift for index in ends)
    return first, median, last
