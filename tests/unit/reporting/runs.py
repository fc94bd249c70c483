"""Runs made up for tests: the controller's messages of a small run, told to a reporter.

The divergences follow a formula, so tests know which linear is the worst: the first layer's fc2.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality import (
    DivergenceTable,
    LinearDivergence,
    OptionDivergence,
    problem_dict,
)
from megatron_snip.planning.plan import PrecisionPlan, changed_linears
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting.reporter import Applied, Event, FileReporter, Refresh, Reporter
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics, StatisticsTable

KINDS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
WIDTHS = (3, 1, 4, 4)
FORMAT_ERROR = {"bf16": 0.0, "fp8": 0.01, "fp4": 0.3}


@dataclass(frozen=True)
class Shape:
    """What the run is like; `config` is what SNIP is told."""

    config: SnipConfig
    steps: int = 24
    layers: int = 3
    stages: int = 1
    kinds: tuple[str, ...] = KINDS
    events: tuple[Event, ...] = ()

    @property
    def names(self) -> list[str]:
        return [f"decoder.layers.{k}.{kind}" for k in range(self.layers) for kind in self.kinds]


def config(**values: Any) -> SnipConfig:
    given = {"enabled": True, "interval": 8, "start_step": 2, "lag": 2, "efficiency_target": 0.6}
    return SnipConfig(**(given | values))


def refresh_at(shape: Shape, step: int) -> Refresh:
    c = shape.config
    rows, raw = [], []
    for k, name in enumerate(shape.names):
        layer, kind = divmod(k, len(shape.kinds))
        weight = (1 + kind) / (1 + layer) * (1 + 0.5 * math.sin(step + k))
        options = {o: _divergence(o.formats, weight) for o in c.options}
        stage = layer * shape.stages // shape.layers
        flops = float(WIDTHS[kind % len(WIDTHS)]) * 6e3
        rows.append(LinearDivergence(name, stage, flops, options))
        formats = {f: FormatStatistics(fisher=weight) for f in c.formats}
        raw.append(LinearStatistics(name, stage, 64, 64, flops, 1.0, 128.0, formats=formats))
    table = DivergenceTable(step, tuple(rows))
    problem = problem_dict(table, c.lowest_format, c.efficiency_target)
    statistics = StatisticsTable(step, 4.0, tuple(raw))
    return Refresh(step, statistics, table, problem, seconds=0.25)


def plan_from(shape: Shape, refresh: Refresh) -> PrecisionPlan:
    problem = PlanningProblem.from_dict(refresh.problem)
    plan = make_plan(problem, PlanSettings.from_config(shape.config))
    return plan.model_copy(update={"step": refresh.step, "seconds": 0.125})


def metrics_at(step: int, fraction: float) -> dict[str, Any]:
    values = {"loss": 2 + 4 * math.exp(-step / 8), "grad_norm": 1.0, "lr": 1e-3}
    values |= {"tokens_per_s": 1000.0, "lowest_precision_fraction": fraction}
    if step % 10 == 0:
        values["validation_loss"] = values["loss"] + 0.1
    return values


def tell(reporter: Reporter, shape: Shape, first: int = 0, close: bool = True) -> None:
    """Tell a reporter of the steps from `first` on, as the controller does."""
    c = shape.config
    plan: PrecisionPlan | None = None
    pending: PrecisionPlan | None = None
    for step in range(first, shape.steps):
        if pending is not None and step == pending.step + c.lag:
            changed = len(changed_linears(plan, pending))
            reporter.planned(Applied(pending, step, changed, waited_s=0.002))
            plan, pending = pending, None
        if c.enabled and step >= c.start_step and (step - c.start_step) % c.interval == 0:
            refresh = refresh_at(shape, step)
            reporter.refreshed(refresh)
            if not c.collect_only:
                pending = plan_from(shape, refresh)
        for event in shape.events:
            if event.step == step:
                reporter.event(event)
        reporter.metrics(step, metrics_at(step, 0.0 if plan is None else plan.efficiency))
    if close:
        reporter.close()


def write_run(path: Path, shape: Shape, first: int = 0) -> Path:
    """Write a run's directory."""
    directory = RunDirectory(path)
    settings = {
        "train_iters": shape.steps,
        "lr": 1e-3,
        "snip": shape.config.model_dump(mode="json"),
    }
    directory.start(settings)
    tell(FileReporter(directory), shape, first)
    return path


def _divergence(formats: tuple[str, str, str], weight: float) -> OptionDivergence:
    error = weight * sum(FORMAT_ERROR[name] for name in formats) / 3
    return OptionDivergence(error**2, error, error**2 + 0.1 * error, error, error)
