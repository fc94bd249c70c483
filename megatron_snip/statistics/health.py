"""Low-precision health: what quantization does to each tensor of a linear; docs/glossary.md.

It is made of what `measure.py` adds up over the sampled rows. Sums are scaled to all tokens of the
measured microbatches, and add over shards, microbatches and ranks; amax is a maximum. Experts have
sums of their own beside their linear's.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_snip.alert_thresholds import HealthMeasure
from megatron_snip.kernels.launch import LOWEST_LOG2, NUM_BINS, NUM_SUMS
from megatron_snip.statistics.health_table import (
    SMALL_IS_BAD,
    HealthTable,
    LinearHealth,
    OperandHealth,
)
from megatron_snip.statistics.measure import ERROR_SQUARE, ZEROED
from megatron_snip.statistics.records import (
    FormatStatistics,
    LinearStatistics,
    StatisticsTable,
)
from megatron_snip.types import Operand


def _linear_health(
    s: LinearStatistics,
    sums: Tensor,
    norms: list[float],
    ends: list[list[list[int]]],
    amax: list[float],
    experts: Tensor,
    grad_scale: float,
) -> LinearHealth:
    """Return the health of one linear.

    Args:
        s: Its statistics.
        sums: Its sums, as `OperandSums.sums`.
        norms: Its norms, as `gradients.gradient_norms` returns them.
        ends: What `_ends` returns for the histograms of `sums`.
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
    for o, (operand, unit) in enumerate(units.items()):
        *by_format, original = sums[o].tolist()
        shift = math.log2(unit)
        largest[operand] = amax[o] * unit if math.isfinite(amax[o]) else None
        histogram = _histogram(original[NUM_SUMS:], ends[o][-1], shift)
        if histogram is not None:
            histograms[operand] = histogram
        for f, name in enumerate(s.formats):
            worst_expert = {}
            for measure, (which, values) in worst.items():
                if math.isfinite(values[o][f]):
                    worst_expert[measure] = (which[o][f], values[o][f])
            operands[name][operand] = _operand_health(
                by_format[f], original, _spread(ends[o][f], shift), worst_expert
            )

    grad_square, num_elements = norms
    # Optimizers of several instances own each element several times.
    num_owners = num_elements // (s.in_features * s.out_features * max(1, len(experts)))
    gradient_norm = None
    if num_elements and math.isfinite(grad_square):
        gradient_norm = math.sqrt(grad_square / max(1.0, num_owners))
    gradient_noise = {
        name: _gradient_noise(s, errors, gradient_norm) for name, errors in s.formats.items()
    }
    return LinearHealth(
        name=s.name,
        stage=s.stage,
        gradient_norm=gradient_norm,
        amax=largest,
        operands=operands,
        histograms=histograms,
        gradient_noise=gradient_noise,
    )


def _gradient_noise(
    s: LinearStatistics, errors: FormatStatistics, gradient_norm: float | None
) -> float | None:
    """Return sqrt(3) |eW| / |dL/dW|; None if it is infinite, NaN, or there is no gradient.

    |eW|^2 is estimated as if the errors of all elements were independent. In small runs the
    measured error of wgrad was 0.7 to 1.3 times this.
    """
    of_grad = errors.grad_error_square * s.input_square
    of_input = errors.input_error_square * s.grad_square
    if not gradient_norm or not s.tokens or not 0 <= of_grad + of_input < math.inf:
        return None
    return math.sqrt(3 * (of_grad + of_input) / s.tokens) / gradient_norm


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
    error, zeros, saturated = numbers[:NUM_SUMS]
    square, num_elements = original[:2]
    return OperandHealth(
        sqnr_db=_db(square, error),
        underflow=zeros / num_elements if num_elements else None,
        saturated=saturated / num_elements if num_elements else None,
        scale_log2=scale_log2,
        worst_expert=worst_expert,
    )


def _worst_experts(experts: Tensor) -> dict[HealthMeasure, tuple[Any, Any]]:
    """Return (worst expert, its value) by measure; both are lists [operands][formats]."""
    if not len(experts):
        return {}
    by_format = experts[:, :, :-1]  # [experts, operands, formats, NUM_SUMS]
    originals = experts[:, :, -1:]
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
    sums: Tensor,
    norms: Tensor,
    amax: Tensor,
    experts: Sequence[Tensor],
    grad_scale: float,
) -> HealthTable:
    """Return the health of the observed linears.

    Args:
        table: The statistics of the linears.
        sums: The sums of all linears over all ranks: `OperandSums.sums` of each.
        norms: Their norms over all ranks.
        amax: The largest magnitudes of X, W and G of each linear over all ranks.
        experts: `RankSums.experts` of each linear's experts, over all ranks; nothing for linears
            without experts.
        grad_scale: Factor from G as the linear sees it to the gradient of the batch-mean loss.
    """
    ends = _ends(sums[..., NUM_SUMS:]).tolist()
    linears = []
    for i, statistics in enumerate(table.linears):
        if not statistics.microbatches:
            continue
        of_norms, largest = norms[i].tolist(), amax[i].tolist()
        linears.append(
            _linear_health(statistics, sums[i], of_norms, ends[i], largest, experts[i], grad_scale)
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
