"""The sums of all ranks become one table of statistics and health, the same on every rank.

The sums are FP64, one row for each linear (`rows.py`), after a row that counts the ranks which
failed to measure. They are sums over the measured microbatches. The numbers of microbatches and of
tokens in the batch stand before them in each row: statistics are scaled to all tokens of the batch.
Rows of experts, which only health reads, follow in a second exchange, in FP32: there are as many
as linears times experts, so they are the most bytes of a refresh.

G times `grad_scale` is the gradient of the batch-mean loss (`TrainingStep.grad_scale`).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_snip.collectives import Control, RemoteFailure, ranks_text
from megatron_snip.log import warn_once
from megatron_snip.statistics.health import make_health_table
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.measure_added import added_names
from megatron_snip.statistics.records import (
    BASE_COLUMNS,
    FORMAT_COLUMNS,
    PRODUCT_COLUMNS,
    Column,
    FormatStatistics,
    LinearStatistics,
    StatisticsTable,
    column_of,
)
from megatron_snip.statistics.row_sums import BatchCounts, RankRows
from megatron_snip.statistics.rows import RowLayout
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import LinearInfo
from megatron_snip.types import Operand

logger = logging.getLogger(__name__)

K = TypeVar("K")


def reduce_sums(
    own: RankRows,
    settings: MeasureSettings,
    linears: Sequence[LinearInfo],
    grad_scale: float,
    loss: float | None,
    norms: Callable[[], Mapping[str, Tensor]],
    control: Control,
    also_summed: Tensor | None = None,
) -> tuple[StatisticsTable, HealthTable]:
    """All ranks: return statistics and health of the model, the same on every rank.

    Args:
        own: This rank's sums.
        settings: What was measured.
        linears: Every linear of the model, in the same order on all ranks.
        grad_scale: The factor from G as the linears see it to the gradient of the batch-mean loss.
        loss: The loss of the iteration, the same on all ranks.
        norms: Returns this rank's `sensitivity.weight_norms`; its errors count as failures.
        control: the control plane of all ranks.
        also_summed: a few FP64 numbers of the caller, which get their sums over all ranks in the
            same exchange; unchanged after an error.

    Raises:
        RemoteFailure: on every rank, if measuring failed on any.
    """
    layout = RowLayout(settings.formats)
    names = [linear.name for linear in linears]
    of_experts = dict(settings.num_experts)
    if control.size == 1:
        for name, expert in own.experts:
            of_experts[name] = max(of_experts.get(name, 0), 1 + expert)
    counts = [of_experts.get(name, 0) for name in names]
    # Experts have rows of their own.
    experts = [(name, i) for name, count in zip(names, counts, strict=True) for i in range(count)]
    also = torch.zeros(0, dtype=torch.float64) if also_summed is None else also_summed
    num_counts = len(BatchCounts._fields)
    width = num_counts + layout.width
    sum_names = added_names(settings, "sum")
    maximum_names = added_names(settings, "max")
    sizes = [2 + len(also), len(linears) * width, len(linears) * len(sum_names)]
    # Views of one tensor: what is written to them is summed with it, in one exchange.
    summed = torch.zeros(sum(sizes), dtype=torch.float64)
    head, table, added = torch.split(summed, sizes)
    added = added.view(len(linears), len(sum_names))
    # A sum of all ranks is rounded log2(ranks) times, each time by 6e-8 at most.
    expert_rows = torch.zeros((len(experts), layout.expert_width), dtype=torch.float32)
    batch, rows = torch.split(table.view(len(linears), width), [num_counts, layout.width], dim=1)
    sums = layout.split(rows)
    # Of these ranks take the maximum. Magnitudes are positive; what plugins add need not be.
    maxima = torch.full((len(linears), len(Operand) + len(maximum_names)), -torch.inf)
    amax, added_maxima = torch.split(maxima, [len(Operand), len(maximum_names)], dim=1)
    amax.zero_()
    head[2:] = also
    try:
        _fill(rows, own.rows, names)
        own_counts = {n: torch.tensor(c, dtype=torch.float64) for n, c in own.counts.items()}
        _fill(batch, own_counts, names)
        _fill(sums.norms, norms(), names)
        _fill(amax, own.amax, names)
        _fill(added, own.added, names)
        _fill(added_maxima, own.added_maxima, names)
        # A maximum over ranks may lose a NaN.
        amax.nan_to_num_(nan=math.inf, posinf=math.inf)
        added_maxima.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        _fill(expert_rows, own.experts, experts)
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
        control.sum_(expert_rows)
    expert_rows = expert_rows.double()

    named = [dict(zip(layout.columns, row, strict=True)) for row in sums.statistics.tolist()]
    # A layer that is repeated three times counts a third of a microbatch in each call. Rounding
    # removes the error of adding thirds.
    in_batch = [BatchCounts(round(count, 6), tokens) for count, tokens in batch.tolist()]
    batch_tokens = _batch_tokens(linears, in_batch)
    of_plugins = torch.cat([added, added_maxima.double()], dim=1).tolist()
    for row, values in zip(named, of_plugins, strict=True):
        row.update(zip([*sum_names, *maximum_names], values, strict=True))
    decoded = []
    for info, row, total in zip(linears, named, in_batch, strict=True):
        decoded.append(
            _linear_statistics(
                info,
                row,
                total,
                settings=settings,
                grad_scale=grad_scale,
                batch_tokens=batch_tokens,
            )
        )
    statistics = StatisticsTable(settings.iteration, loss, tuple(decoded))
    health = make_health_table(
        statistics,
        sums=sums,
        amax=amax,
        experts=[layout.split_experts(part) for part in torch.split(expert_rows, counts)],
        grad_scale=grad_scale,
    )
    return statistics, health


def _fill(table: Tensor, rows: Mapping[K, Tensor], keys: Sequence[K]) -> None:
    """Write this rank's rows where their keys are; waits for the device once."""
    if rows:
        index = {key: i for i, key in enumerate(keys)}
        table[[index[key] for key in rows]] = torch.stack(list(rows.values())).cpu().to(table.dtype)


def _warn_about_failed_statistics(own: RankRows, control: Control) -> None:
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


def _batch_tokens(linears: Sequence[LinearInfo], counts: Sequence[BatchCounts]) -> float:
    """Return the number of tokens of the batch, T of the equations.

    It is counted by dense linears, because experts may drop tokens, and their rows may be padded.
    If no backward reaches a dense linear, it is counted by the experts.
    """
    of_experts = 0.0
    of_dense = 0.0
    for info, own in zip(linears, counts, strict=True):
        tokens = own.tokens / info.calls_per_token
        if info.is_of_experts:
            of_experts = max(of_experts, tokens)
        else:
            of_dense = max(of_dense, tokens)
    return of_dense or of_experts


def _linear_statistics(
    info: LinearInfo,
    row: Mapping[str, float],
    counts: BatchCounts,
    *,
    settings: MeasureSettings,
    grad_scale: float,
    batch_tokens: float,
) -> LinearStatistics:
    """Turn sums into the units of `records.py`.

    Args:
        info: the linear.
        row: sums by the name of the column; those of plugins, and their maxima, by `added_names`.
        counts: what the linear multiplied in the batch.
        settings: what was measured.
        grad_scale: as in `reduce_sums`.
        batch_tokens: tokens of the batch, T in the equations.
    """
    measured = row["microbatches"] or 1.0  # without measured microbatches all sums are 0
    # Of experts it may be that tokens came only after the measured microbatches.
    is_measured = row["microbatches"] > 0 and (row["tokens"] > 0 or counts.tokens == 0)
    expansion = counts.tokens / row["tokens"] if row["tokens"] else 1.0

    def scaled(name: str, column: Column | None = None) -> float:
        column = column or column_of(name)
        value = row[name] * grad_scale**column.grad_power
        if column.over == "weight":  # each measured microbatch adds it; the mean is reported
            return value / measured
        if column.over == "all":  # it is no sum over measured tokens
            return value
        return value * expansion

    # NaN and not 0: an option without harm would be free for the planner.
    not_measured: frozenset[str] = frozenset() if settings.products else PRODUCT_COLUMNS

    base: dict[str, Any] = {column: scaled(column) for column in BASE_COLUMNS}
    base |= dict.fromkeys(not_measured & base.keys(), math.nan)
    # So far `microbatches` and `tokens` count what was measured; from here on all of the batch.
    # Where nothing was measured they are 0.
    base |= (counts if is_measured else BatchCounts(0.0, 0.0))._asdict()
    # Without moments the gradient stands for the update.
    update_square = base["update_square"] or base["wgrad_square"] or 1.0
    by_format = {}
    for name in settings.formats:
        values = {column: scaled(f"{name}.{column}") for column in FORMAT_COLUMNS}
        values["fisher"] *= batch_tokens / info.out_features
        values["aligned_fisher"] *= batch_tokens
        values["local_square"] /= update_square
        values |= dict.fromkeys(not_measured & values.keys(), math.nan)
        added = {}
        for key, each in settings.added.items():
            value = scaled(f"{name}.{key}", each.column)
            if math.isfinite(value):
                added[key] = value
        by_format[name] = FormatStatistics(**values, added=added)
    return LinearStatistics(**vars(info), **base, formats=by_format)
