"""RunRecord: a run directory as somebody who looks at the run needs it.

Runs under way are read like finished ones: a half-written last line is left for later, and other
files are written whole. Read without torch. Plans of steps that a resumed run has not come to again
are not shown.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.config import SnipConfig, make_config, read_yaml
from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option
from megatron_snip.planning.json_file import read_json
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.planning.problem import PlanningProblem, read_problem
from megatron_snip.reporting.divergence_record import DivergenceRecord, read_divergences
from megatron_snip.reporting.metrics_log import MetricsLog


@dataclass(frozen=True)
class PlanSpan:
    """Steps during which one plan was in force.

    Attributes:
        start: first step (0-based).
        end: one past the last step made so far.
        linears: option of each linear.
        plan: the plan; None for the options that the run began with.
        changed: linears whose option it changed.
    """

    start: int
    end: int
    linears: dict[str, Option]
    plan: PrecisionPlan | None
    changed: int


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        path: its directory.
        name: what to call it.
        config: config.yaml as plain values.
        snip: SNIP's settings; None where they are of another version of this package.
        versions: versions.json; empty while it is not written.
        metrics: every training step.
        spans: plans in force, in order; none for a run without plans.
        divergences: of the last refresh, or None.
        problem: of the last refresh, or None.
        problem_step: the step of that refresh.
    """

    path: Path
    name: str
    config: dict[str, Any]
    snip: SnipConfig | None
    versions: dict[str, str | None]
    metrics: MetricsLog
    spans: tuple[PlanSpan, ...]
    divergences: DivergenceRecord | None
    problem: PlanningProblem | None
    problem_step: int | None

    @property
    def plan(self) -> PrecisionPlan | None:
        """The plan in force at the end, or None."""
        return self.spans[-1].plan if self.spans else None

    @property
    def plans(self) -> tuple[PlanSpan, ...]:
        """The spans of plans that were applied; what the run began with is not among them."""
        return tuple(span for span in self.spans if span.plan is not None)

    @property
    def num_steps(self) -> int:
        """Training steps made, counted from step 0."""
        return self.metrics.last_step + 1

    @property
    def planned_steps(self) -> int | None:
        """Training steps that the run is to make, where its settings say so."""
        return planned_steps(self.config)

    @property
    def lowest_formats(self) -> str:
        """What `lowest_precision_fraction` counts."""
        return "lowest precision" if self.snip is None else self.snip.lowest_formats

    @property
    def target(self) -> float | None:
        """The efficiency asked for; None where no plan is made."""
        if self.snip is None or not self.snip.enabled or self.snip.collect_only:
            return None
        return self.snip.efficiency_target


def check_run_directory(path: Path) -> None:
    """Refuse what is not a run directory.

    Raises:
        UsageError: one line that says what is missing.
    """
    if not path.exists():
        raise UsageError(f"cannot find the run directory '{path}'")
    if not path.is_dir():
        raise UsageError(f"'{path}' is a file; give the run's directory")
    if not (path / "config.yaml").is_file():
        inside = path / "snip"
        hint = f"; did you mean '{inside}'?" if (inside / "config.yaml").is_file() else ""
        raise UsageError(f"'{path}' is not a run directory: it has no config.yaml{hint}")


def read_run(path: Path, name: str | None = None) -> RunRecord:
    """Read a run's directory.

    Args:
        path: the directory.
        name: what to call it; by default the directory's name.

    Raises:
        UsageError: if it is no run directory, no step has ended, or a file is damaged; one line.
    """
    check_run_directory(path)
    config = read_yaml(path / "config.yaml")
    metrics = MetricsLog(path / "metrics.jsonl")
    metrics.read_more()  # first: every plan that it names was written before
    if not metrics.rows:
        raise UsageError(f"'{path}' has no metrics yet: no training step has ended")
    snip = snip_config(config)
    refreshed = _last(path / "problems", metrics.last_step)
    measured = _last(path / "divergences", metrics.last_step)
    return RunRecord(
        path=path,
        name=name or path.resolve().name,
        config=config,
        snip=snip,
        versions=_versions(path / "versions.json"),
        metrics=metrics,
        spans=plan_spans(path, metrics, snip),
        divergences=None if measured is None else read_divergences(measured),
        problem=None if refreshed is None else read_problem(refreshed),
        problem_step=None if refreshed is None else int(refreshed.stem),
    )


def snip_config(config: dict[str, Any]) -> SnipConfig | None:
    """Return SNIP's settings from a run's config, or None if this version does not know them."""
    values = config.get("snip")
    if isinstance(values, dict) and all(isinstance(key, str) for key in values):
        with contextlib.suppress(UsageError):
            return make_config(values)
    return None


def planned_steps(config: dict[str, Any]) -> int | None:
    """Return `train_iters` of the embedded trainer or of Megatron, where it is given."""
    megatron = config.get("megatron")
    for values in (config, megatron if isinstance(megatron, dict) else {}):
        steps = values.get("train_iters")
        if isinstance(steps, int) and not isinstance(steps, bool):
            return steps
    return None


def plan_spans(path: Path, metrics: MetricsLog, snip: SnipConfig | None) -> tuple[PlanSpan, ...]:
    """Return the plans in force, in order.

    Args:
        path: the run's directory.
        metrics: says which plan was applied when.
        snip: says what the run began with, if it began at step 0 and without a plan file.

    Raises:
        UsageError: if a plan file is missing or damaged.
    """
    marks = metrics.plans
    if not marks:
        return ()
    ends = [mark.step for mark in marks[1:]] + [metrics.last_step + 1]
    plans = {m.plan_step: read_plan(path / "plans" / f"{m.plan_step}.json") for m in marks}
    spans = [
        PlanSpan(mark.step, end, plans[mark.plan_step].linears, plans[mark.plan_step], mark.changed)
        for mark, end in zip(marks, ends, strict=True)
    ]
    begin = metrics.rows[0]["step"]
    fresh = begin == 0 and snip is not None and snip.plan_file is None
    if snip is not None and fresh and spans[0].start > 0:
        options = dict.fromkeys(spans[0].linears, BF16)
        spans.insert(0, PlanSpan(0, spans[0].start, options, None, 0))
    return tuple(spans)


def _versions(path: Path) -> dict[str, str | None]:
    if not path.is_file():
        return {}
    value = read_json(path, "versions file")
    if not isinstance(value, dict):
        raise UsageError(f"versions file '{path}' must hold a JSON object")
    return {str(k): None if v is None else str(v) for k, v in value.items()}


def _last(directory: Path, step: int) -> Path | None:
    """Return the file of the last step that is not after `step`."""
    steps = [int(file.stem) for file in directory.glob("*.json") if file.stem.isdecimal()]
    return max((directory / f"{s}.json" for s in steps if s <= step), key=_step, default=None)


def _step(file: Path) -> int:
    return int(file.stem)
