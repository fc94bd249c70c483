"""The sums of all ranks become one table of statistics and health, the same on every rank.

The sums of all linears are one FP64 vector, which begins with the number of ranks that failed to
measure. They are sums over the measured microbatches; with the numbers of tokens that were measured
and that the batch has, statistics are scaled to all tokens of the batch. Sums of experts, which
only health reads, follow in a second exchange, in FP32: there are as many as linears times experts,
so they are the most bytes of a refresh.

G times `grad_scale` is the gradient of the batch-mean loss (`TrainingStep.grad_scale`).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megatron_snip.collectives import Control, RemoteFailure, ranks_text
from megatron_snip.kernels.launch import NUM_SUMS
from megatron_snip.log import warn_once
from megatron_snip.statistics.gradients import NUM_NORMS
from megatron_snip.statistics.health import make_health_table
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.measure import ERROR_SQUARE, OPERAND_SUMS
from megatron_snip.statistics.measure_added import added_names
from megatron_snip.statistics.rank_sums import BatchCounts, MeasuredCounts, RankSums
from megatron_snip.statistics.records import (
    FormatStatistics,
    LinearStatistics,
    StatisticsTable,
)
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import LinearInfo
from megatron_snip.types import Operand

logger = logging.getLogger(__name__)

K = TypeVar("K")


def reduce_sums(
    own: RankSums,
    settings: MeasureSettings,
    linears: Sequence[LinearInfo],
    grad_scale: float,
    loss: float | None,
    own_norms: Callable[[], Mapping[str, Tensor]],
    control: Control,
    also_summed: Tensor | None = None,
) -> tuple[StatisticsTable, HealthTable]:
    """All ranks: return statistics and health of the model, the same on every rank.

    Args:
        own: This rank's sums, after `finish`.
        settings: What was measured.
        linears: Every linear of the model, in the same order on all ranks.
        grad_scale: The factor from G as the linears see it to the gradient of the batch-mean loss.
        loss: The loss of the iteration, the same on all ranks.
        own_norms: Returns this rank's `gradients.gradient_norms`; its errors count as failures.
        control: the control plane of all ranks.
        also_summed: a few FP64 numbers of the caller, which get their sums over all ranks in the
            same exchange; unchanged after an error.

    Raises:
        RemoteFailure: on every rank, if measuring failed on any.
    """
    names = [linear.name for linear in linears]
    of_experts = dict(settings.num_experts)
    if control.size == 1:
        for name, expert in own.experts:
            of_experts[name] = max(of_experts.get(name, 0), 1 + expert)
    counts = [of_experts.get(name, 0) for name in names]
    experts = [(name, i) for name, count in zip(names, counts, strict=True) for i in range(count)]
    also = torch.zeros(0, dtype=torch.float64) if also_summed is None else also_summed
    sum_names = added_names(settings, "sum")
    maximum_names = added_names(settings, "max")
    of_operands = (len(Operand), 1 + len(settings.formats))
    shapes = [
        (2 + len(also),),
        (len(linears), len(BatchCounts._fields)),
        (len(linears), len(MeasuredCounts._fields)),
        (len(linears), NUM_NORMS),
        (len(linears), *of_operands, OPERAND_SUMS),
        (len(linears), len(sum_names)),
    ]
    sizes = [math.prod(shape) for shape in shapes]
    # Views of one tensor: what is written to them is summed with it, in one exchange.
    summed = torch.zeros(sum(sizes), dtype=torch.float64)
    parts = zip(torch.split(summed, sizes), shapes, strict=True)
    head, batch, measured, norms, sums, added = (part.view(shape) for part, shape in parts)
    # A sum of all ranks is rounded log2(ranks) times, each time by 6e-8 at most.
    expert_sums = torch.zeros((len(experts), *of_operands, NUM_SUMS), dtype=torch.float32)
    # Of these ranks take the maximum. Magnitudes are positive; what plugins add need not be.
    maxima = torch.full((len(linears), len(Operand) + len(maximum_names)), -torch.inf)
    amax, added_maxima = torch.split(maxima, [len(Operand), len(maximum_names)], dim=1)
    amax.zero_()
    head[2:] = also
    try:
        for table, own_counts in ((batch, own.counts), (measured, own.measured)):
            fp64 = {n: torch.tensor(c, dtype=torch.float64) for n, c in own_counts.items()}
            _fill(table, fp64, names)
        _fill(sums, own.sums, names)
        _fill(norms, own_norms(), names)
        _fill(amax, own.amax, names)
        _fill(added, own.added, names)
        _fill(added_maxima, own.added_maxima, names)
        # A maximum over ranks may lose a NaN.
        amax.nan_to_num_(nan=math.inf, posinf=math.inf)
        added_maxima.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        _fill(expert_sums, own.experts, experts)
    except Exception as error:  # the other ranks wait in the sum
        own.record_failure(error)
    head[0] = float(own.failure is not None)
    head[1] = float(len(own.failed_statistics))
    control.sum_(summed, maxima)
    if head[0] > 0:
        found = control.gather("measuring", lambda: own.failure)
        by_text = zip(found.values, found.ranks, strict=True)
        raise RemoteFailure("measuring", {text: ranks for text, ranks in by_text if text})
    also.copy_(head[2:])
    if head[1] > 0:
        _warn_about_failed_statistics(own, control)
    if experts:
        control.sum_(expert_sums)

    # A layer that is repeated three times counts a third of a microbatch in each call. Rounding
    # removes the error of adding thirds.
    in_batch = [BatchCounts(round(count, 6), tokens) for count, tokens in batch.tolist()]
    of_plugins = torch.cat([added, added_maxima.double()], dim=1).tolist()
    decoded = []
    for i, info in enumerate(linears):
        decoded.append(
            _linear_statistics(
                info,
                sums[i, :, :, :NUM_SUMS].tolist(),
                dict(zip([*sum_names, *maximum_names], of_plugins[i], strict=True)),
                MeasuredCounts(*measured[i].tolist()),
                in_batch[i],
                settings,
                grad_scale,
            )
        )
    statistics = StatisticsTable(settings.iteration, loss, tuple(decoded))
    health = make_health_table(
        statistics,
        sums=sums,
        norms=norms,
        amax=amax,
        experts=torch.split(expert_sums.double(), counts),
        grad_scale=grad_scale,
    )
    return statistics, health


def _fill(table: Tensor, rows: Mapping[K, Tensor], keys: Sequence[K]) -> None:
    """Write this rank's rows where their keys are; waits for the device once."""
    if rows:
        index = {key: i for i, key in enumerate(keys)}
        table[[index[key] for key in rows]] = torch.stack(list(rows.values())).cpu().to(table.dtype)


def _warn_about_failed_statistics(own: RankSums, control: Control) -> None:
    """All ranks: rank 0 warns about the statistics of plugins that failed, each once in a run."""
    found = control.gather("statistics of plugins", lambda: own.failed_statistics)
    if control.rank != 0:
        return
    reasons: dict[str, str] = {}
    for failed, ranks in zip(found.values, found.ranks, strict=True):
        for name, reason in failed.items():
            reasons.setdefault(name, f"{reason} (on {ranks_text(ranks)})")
    for name, reason in reasons.items():
        text = f"statistic '{name}' is left out where its plugin failed to measure it: {reason}"
        warn_once(logger, text)


def _linear_statistics(
    info: LinearInfo,
    sums: list[list[list[float]]],
    added: Mapping[str, float],
    measured: MeasuredCounts,
    counts: BatchCounts,
    settings: MeasureSettings,
    grad_scale: float,
) -> LinearStatistics:
    """Turn sums into the units of `records.py`.

    Args:
        info: the linear.
        sums: NUM_SUMS sums of each operand in each format, and before quantization.
        added: sums and maxima of plugins' statistics, by `added_names`.
        measured: what was measured of the linear.
        counts: what the linear multiplied in the batch.
        settings: what was measured.
        grad_scale: as in `reduce_sums`.
    """
    # Of experts it may be that tokens came only after the measured microbatches.
    is_measured = measured.microbatches > 0 and (measured.tokens > 0 or counts.tokens == 0)
    tokens = counts.tokens / measured.tokens if measured.tokens else 1.0
    of_input, of_weight, of_grad = sums
    grad = tokens * grad_scale**2
    # Without measured microbatches all sums are 0.
    weight_square = measured.weight_square / (measured.weights or 1.0)
    # The sampled rows give the relative error, and all rows its scale. A weight of zeros has none.
    sampled_square = of_weight[-1][ERROR_SQUARE]
    weight = weight_square / sampled_square if sampled_square else math.nan
    if weight_square == 0:
        weight = 1.0

    by_format = {}
    for f, name in enumerate(settings.formats):
        of_plugins = {}
        for key, each in settings.added.items():
            value = added[f"{name}.{key}"] * grad_scale**each.column.grad_power
            if each.column.over == "weight":  # each measured microbatch adds it
                value /= measured.microbatches or 1.0
            elif each.column.over != "all":  # else it is no sum
                value *= tokens
            if math.isfinite(value):
                of_plugins[key] = value
        by_format[name] = FormatStatistics(
            input_error_square=tokens * of_input[f][ERROR_SQUARE],
            weight_error_square=weight * of_weight[f][ERROR_SQUARE],
            grad_error_square=grad * of_grad[f][ERROR_SQUARE],
            added=of_plugins,
        )
    # Where nothing was measured the counts are 0.
    return LinearStatistics(
        **vars(info),
        **(counts if is_measured else BatchCounts(0.0, 0.0))._asdict(),
        input_square=tokens * of_input[-1][ERROR_SQUARE],
        weight_square=weight_square,
        grad_square=grad * of_grad[-1][ERROR_SQUARE],
        formats=by_format,
    )
