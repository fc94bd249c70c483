"""Outcome: what is kept of a finished run, read from its directory. JSON, schema version 1."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_snip.comparison.run import Run
from megatron_snip.config import explain
from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option
from megatron_snip.planning.json_file import read_json
from megatron_snip.planning.plan import read_plan
from megatron_snip.reporting.metrics_log import MetricsLog
from megatron_snip.reporting.run_record import RunRecord, read_run
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.config import linear_shapes

VERSION = 1


@dataclass(frozen=True)
class Outcome:
    """A finished run's numbers; NaN where something was not finite.

    Attributes:
        key: of the run.
        steps: training steps (0-based), after the checkpoint.
        losses: training loss of each, before its update.
        validation_steps: steps that were evaluated after their update.
        validation_losses: held-out loss then, in the precision of the plan in force.
        lowest_fraction: share of linear FLOPs in the lowest precision that the run had on offer,
            as it reported it, mean over the steps.
        shares: share of linear FLOPs by format, mean over the steps.
        refreshes: refreshes within the run.
        seconds: wall time of its steps and evaluations.
        options: by linear, the share of the steps at each option; empty in files from before it
            was kept.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=True, revalidate_instances="always")

    key: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    validation_steps: tuple[int, ...]
    validation_losses: tuple[float, ...]
    lowest_fraction: float
    shares: dict[str, float]
    refreshes: int
    seconds: float
    options: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def validation_loss(self) -> float:
        """The last one; NaN where there is none."""
        return self.validation_losses[-1] if self.validation_losses else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return plain types; what is not finite becomes None."""
        plain: dict[str, Any] = _nulled({"version": VERSION, **dataclasses.asdict(self)})
        return plain


def read_outcome(path: Path) -> Outcome:
    """Read an outcome's file.

    Raises:
        UsageError: if it is damaged or of another version.
    """
    value = read_json(path, "outcome file")
    if not isinstance(value, dict) or value.pop("version", None) != VERSION:
        raise UsageError(f"'{path}' is not an outcome of version {VERSION}; remove it")
    try:
        fields = {key: _read(item) for key, item in value.items()}
        outcome = _CHECKED.validate_python(Outcome(**fields))
    except (TypeError, ValidationError, RecursionError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)
        raise UsageError(f"'{path}' is not an outcome: {why}; remove it") from None
    curves = (
        ("loss", outcome.steps, outcome.losses),
        ("validation loss", outcome.validation_steps, outcome.validation_losses),
    )
    for name, steps, values in curves:
        ascending = all(a < b for a, b in pairwise((-1, *steps)))
        if len(steps) != len(values) or not ascending:
            raise UsageError(f"'{path}' is not an outcome: its {name} is no curve; remove it")
    for linear, options in outcome.options.items():
        if not _are_shares(options):
            raise UsageError(f"'{path}' is not an outcome: options of '{linear}'; remove it")
    return outcome


def outcome_of(run: Run, run_dir: Path, config: TrainConfig) -> Outcome:
    """Return the outcome of a run that has ended.

    Args:
        run: which.
        run_dir: where it wrote.
        config: its settings.

    Raises:
        UsageError: if the directory is damaged, or the run has not made all its steps.
    """
    record = read_run(run_dir)
    rows = [row for row in record.metrics.rows if row["step"] >= run.first_step]
    if record.metrics.last_step + 1 != run.last_step:
        done = record.metrics.last_step + 1
        raise UsageError(f"'{run_dir}' ends after step {done}, not {run.last_step}")
    steps, losses = _column(record.metrics, "loss", run.first_step)
    at, validation = _column(record.metrics, "validation_loss", run.first_step)
    options = _options(record, config, run)
    return Outcome(
        key=run.key,
        steps=steps,
        losses=losses,
        validation_steps=at,
        validation_losses=validation,
        lowest_fraction=_mean([float(row["lowest_precision_fraction"]) for row in rows]),
        shares=_shares(options, config),
        refreshes=sum(row.get("refresh_s") is not None for row in rows),
        seconds=sum(float(row.get("wall_s") or 0.0) for row in rows),
        options=options,
    )


def _column(log: MetricsLog, name: str, first: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    steps, values = log.column(name)
    kept = steps >= first
    return tuple(steps[kept].tolist()), tuple(values[kept].tolist())


def _options(record: RunRecord, config: TrainConfig, run: Run) -> dict[str, dict[str, float]]:
    """Return, by linear, the share of the run's steps at each option."""
    covered = run.first_step
    plan_file = config.snip.plan_file if config.snip.enabled else None
    plain = dict.fromkeys((shape.name for shape in linear_shapes(config)), BF16)
    if plan_file is not None:  # a plan that a run starts with is in no line of its metrics
        plain = read_plan(plan_file).linears
    spans: list[tuple[int, dict[str, Option]]] = []
    for span in record.spans:
        start = max(span.start, run.first_step)
        spans += [(start - covered, plain), (span.end - start, span.linears)]
        covered = span.end
    spans.append((run.last_step - covered, plain))
    total = run.last_step - run.first_step
    found: dict[str, dict[str, float]] = {name: defaultdict(float) for name in plain}
    for steps, linears in spans:
        for name, option in linears.items() if steps > 0 else ():
            found[name][str(option)] += steps / total
    return {name: dict(options) for name, options in found.items()}


def _shares(options: Mapping[str, Mapping[str, float]], config: TrainConfig) -> dict[str, float]:
    """Return the share of linear FLOPs by format, over GEMMs, linears and steps."""
    shapes = linear_shapes(config)
    total = sum(shape.flops_per_token for shape in shapes)
    found: dict[str, float] = defaultdict(float)
    for shape in shapes:
        for option, share in options[shape.name].items():
            for name in Option.parse(option).formats:
                found[name] += shape.flops_per_token * share / 3 / total
    return dict(found)


def _are_shares(options: Mapping[str, float]) -> bool:
    """Whether these are options and the shares of all steps that they were in force."""
    try:
        for name in options:
            Option.parse(name)
    except UsageError:
        return False
    return all(share >= 0 for share in options.values()) and (
        abs(math.fsum(options.values()) - 1) < 1e-6
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _nulled(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _nulled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nulled(item) for item in value]
    return value


def _read(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {key: _read(item) for key, item in value.items()}
    return tuple(_read(item) for item in value) if isinstance(value, list) else value


_CHECKED = TypeAdapter(Outcome)
