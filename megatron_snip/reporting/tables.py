"""A run as tables for analysis: {column: values}, as `pandas.DataFrame` takes it.

    run = read_run(Path("runs/demo"))
    pandas.DataFrame(losses(run))

Each function returns one table. Files of iterations that a resumed run has not repeated are left
out, as in reports. A missing number is None. pandas is not needed here.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_snip.files import read_json
from megatron_snip.planning.problem import read_problem
from megatron_snip.reporting.run_record import RunRecord, numbered_files
from megatron_snip.statistics.health_table import Finding, HealthTable

Table = dict[str, list[Any]]
"""Values by column; all columns are equally long."""

_METRICS = (
    "iteration",
    "loss",
    "validation_loss",
    "lowest_precision_fraction",
    "step_s",
    "refresh_s",
    "wait_s",
)


def losses(run: RunRecord) -> Table:
    """Return a row for each iteration.

    Columns: `iteration`, `loss`, `validation_loss` (in iterations with an evaluation),
    `lowest_precision_fraction` (share of the linears' FLOPs), and in seconds `step_s`, `refresh_s`
    (of measuring) and `wait_s` (for a plan).
    """
    return _table(_METRICS, ([row.get(name) for name in _METRICS] for row in run.metrics.rows))


def plans(run: RunRecord) -> Table:
    """Return a row for each plan that ran.

    Columns: `start` and `end` (first iteration under it, and the first one after it), `iteration`
    (at which it was asked for), `policy`, `target`, `efficiency`, `quality_loss`, `bound` (proven
    lower bound of the quality loss), `num_changed` (linears) and `digest`.
    """
    columns = (
        *("start", "end", "iteration", "policy", "target", "efficiency"),
        *("quality_loss", "bound", "num_changed", "digest"),
    )
    rows = []
    for span in run.plans:
        plan = span.plan
        made = (plan.iteration, plan.policy, plan.target, plan.efficiency)
        quality = (plan.objective, plan.bound, span.num_changed, plan.digest)
        rows.append((span.start, span.end, *made, *quality))
    return _table(columns, rows)


def precision(run: RunRecord) -> Table:
    """Return a row for each plan that ran and each linear.

    Columns: `start` and `end` of the plan as in `plans`, `linear`, `option`, and the formats of its
    GEMMs: `fprop`, `dgrad`, `wgrad`.
    """
    rows = (
        (span.start, span.end, name, str(option), *option.formats)
        for span in run.plans
        for name, option in span.plan.linears.items()
    )
    return _table(("start", "end", "linear", "option", "fprop", "dgrad", "wgrad"), rows)


def quality_losses(run: RunRecord) -> Table:
    """Return a row for each refresh, linear and option.

    Columns: `iteration`, `linear`, `stage`, `flops` (of the linear, per token), `option`, `saving`
    (share of the linear's FLOPs in the lowest precision) and `quality_loss` (None: forbidden).
    """
    columns = ("iteration", "linear", "stage", "flops", "option", "saving", "quality_loss")
    rows = (
        (at, row.name, row.stage, row.flops, option, cost.saving, cost.quality_loss)
        for at, path in _of_refreshes(run, "problems")
        for row in read_problem(path).linears
        for option, cost in row.options.items()
    )
    return _table(columns, rows)


def statistics(run: RunRecord) -> Table:
    """Return a row for each refresh, linear and statistic; plugins may have added some.

    Columns: `iteration`, `linear`, `statistic`, such as `input_square`, and in a format
    `fp4.input_error_square` (`statistics/records.py` describes them), and `value`.
    """
    rows = (
        (at, row.name, name, value)
        for at, path in _of_refreshes(run, "problems")
        for row in read_problem(path).linears
        for name, value in row.statistics.items()
    )
    return _table(("iteration", "linear", "statistic", "value"), rows)


def health(run: RunRecord) -> Table:
    """Return a row for each refresh and each value of a measure of health.

    Columns: `iteration`, `measure` (`health_table.MEANINGS`), `linear`, `tensor` (an operand,
    or empty), `format` (empty before quantization) and `value`.
    """
    rows = (
        (at, *finding)
        for at, path in _of_refreshes(run, "health")
        for finding in HealthTable.from_dict(
            read_json(path, "health file"), f"health file '{path}'"
        ).worst(None)
    )
    return _table(("iteration", *Finding._fields), rows)


def _of_refreshes(run: RunRecord, folder: str) -> Iterator[tuple[int, Path]]:
    """Yield (iteration, file) of each refresh of the run, in ascending order."""
    refreshes = run.metrics.refreshes
    for iteration, path in numbered_files(run.path / folder).items():
        if iteration in refreshes:
            yield iteration, path


def _table(columns: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> Table:
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    return {name: list(found) for name, found in zip(columns, values, strict=True)}
