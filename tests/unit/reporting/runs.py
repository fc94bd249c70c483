"""Made-up runs for tests: the events of a small run, written by the real writers.

The divergences follow a formula. Iterations are Megatron's (1-based).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    DivergenceTable,
    OptionDivergence,
    planning_problem,
)
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, changed_linears
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting.events import (
    Event,
    Measurement,
    Metrics,
    Notice,
    PlanApplied,
    Reporter,
    Writer,
)
from megatron_snip.reporting.precision_record import LinearPrecision, PrecisionRecord
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.statistics.health_table import HealthTable, LinearHealth, OperandHealth
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics, StatisticsTable
from megatron_snip.types import Operand
from tests.unit.planning.build import MODULES

WIDTHS = (3, 1, 4, 4)
FORMAT_ERROR = {"bf16": 0.0, "fp8": 0.01, "fp4": 0.3}


@dataclass(frozen=True)
class Shape:
    """What the run is like.

    `notices`: by iteration. `backend`: in precision/<iteration>.json. `note`: in config.yaml.
    `added`: statistics of plugins.
    """

    config: SnipConfig
    iterations: int = 24
    layers: int = 3
    stages: int = 1
    kinds: tuple[str, ...] = MODULES
    notices: tuple[tuple[int, Notice], ...] = ()
    backend: str | None = None
    note: str = ""
    added: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [f"decoder.layers.{k}.{kind}" for k in range(self.layers) for kind in self.kinds]


def config(**values: Any) -> SnipConfig:
    """Refreshes at 3, 11 and 19; plans are applied two iterations later."""
    given = {"enabled": True, "interval": 8, "start_step": 3, "lag": 2, "efficiency_target": 0.6}
    return SnipConfig(**(given | values))


def measurement_at(shape: Shape, iteration: int) -> Measurement:
    c = shape.config
    rows, raw = {}, []
    for k, name in enumerate(shape.names):
        layer, kind = divmod(k, len(shape.kinds))
        weight = (1 + kind) / (1 + layer) * (1 + 0.5 * math.sin(iteration + k))
        options = {o: _divergence(o, weight) for o in c.options}
        stage = layer * shape.stages // shape.layers
        flops = float(WIDTHS[kind % len(WIDTHS)]) * 6e3
        added = dict.fromkeys(shape.added, weight)
        sums = (weight, 0.25 * weight, 1e-6 * weight)
        formats = {f: FormatStatistics(*sums, added=added) for f in c.named_formats}
        seen = {"microbatches": 1.0, "tokens": 128.0, "input_square": 64.0 + k}
        seen |= {"weight_square": 16.0, "grad_square": 1e-4}
        raw.append(LinearStatistics(name, stage, 64, 64, flops, **seen, formats=formats))
        rows[name] = options
    statistics = StatisticsTable(iteration, 4.0, tuple(raw))
    table = DivergenceTable(statistics, c.lowest_format, rows)
    pins = tuple((glob, str(option)) for glob, option in c.pin_pairs)
    problem = planning_problem(table, c.efficiency_target).model_copy(update={"pins": pins})
    health = health_of(shape, iteration)
    return Measurement(table, problem, 0.25, health, watched=tuple(shape.names[:2]))


def health_of(shape: Shape, iteration: int) -> HealthTable:
    """The k-th linear has 30 - k dB and underflow of k percent in its input."""
    nothing = OperandHealth(None, None, None, None)
    linears = []
    for k, name in enumerate(shape.names):
        operand = OperandHealth(30.0 - k, k / 100, 0.0, (-3.0, 0.0, 2.0))
        operands = dict.fromkeys(Operand, nothing) | {Operand.INPUT: operand}
        amax: dict[Operand, float | None] = dict.fromkeys(Operand, 1.5)
        formats = shape.config.named_formats
        found = dict.fromkeys(formats, operands)
        histograms = dict.fromkeys(Operand, (-3.0, [0.2, 0.5, 0.3]))
        noise: dict[str, float | None] = dict.fromkeys(formats, 0.01 * (k + 1))
        linears.append(LinearHealth(name, 0, 1.0, amax, found, histograms, noise))
    return HealthTable(iteration, tuple(linears))


def plan_from(shape: Shape, measured: Measurement) -> PrecisionPlan:
    settings = PlanSettings.of(shape.config)
    plan = make_plan(measured.problem, settings, None, measured.divergences.statistics.iteration)
    return plan.model_copy(update={"seconds": 0.125})


def applied(
    shape: Shape, plan: PrecisionPlan, before: PrecisionPlan | None = None, **more: Any
) -> PlanApplied:
    num_changed = len(plan.linears if before is None else changed_linears(before, plan))
    resolved = None
    if shape.backend is not None:
        ran = (shape.backend, "bfloat16", None)
        linears = (LinearPrecision(n, str(o), str(o), *ran) for n, o in plan.linears.items())
        at = plan.iteration + shape.config.lag
        unused = ("--snip-pins: x=free",)
        resolved = PrecisionRecord(at, plan.iteration, plan.digest, tuple(linears), unused)
    shares = {"fp4": plan.efficiency, "fp8": 1 - plan.efficiency}
    values = {"num_changed": num_changed, "waited_s": 0.002, "resolved": resolved}
    return PlanApplied(plan, shares, **(values | {"saving_s": 0.007} | more))


def metrics_at(iteration: int, fraction: float) -> dict[str, Any]:
    values = {"loss": 2 + 4 * math.exp(-iteration / 8), "grad_norm": 1.0, "lr": 1e-3}
    values |= {"tokens_per_s": 1000.0, "step_s": 0.25, "lowest_precision_fraction": fraction}
    if iteration % 10 == 0:
        values["validation_loss"] = values["loss"] + 0.1
    return values


def write_events(writer: Writer, shape: Shape, close: bool = True) -> None:
    """Write a run's events in the controller's order."""
    c, reporter = shape.config, Reporter([writer])
    plan: PrecisionPlan | None = None
    pending: PrecisionPlan | None = None
    for at in range(1, shape.iterations + 1):
        if pending is not None and at == pending.iteration + c.lag:
            reporter.write(Event(at, applied(shape, pending, plan)))
            plan, pending = pending, None
        if c.enabled and at >= c.start_step and (at - c.start_step) % c.interval == 0:
            measured = measurement_at(shape, at)
            reporter.write(Event(at, measured))
            if not c.collect_only:
                pending = plan_from(shape, measured)
        for iteration, notice in shape.notices:
            if iteration == at:
                reporter.write(Event(at, notice))
        fraction = 0.0 if plan is None else plan.efficiency
        reporter.write(Event(at, Metrics(metrics_at(at, fraction))))
    if close:
        reporter.close()


def write_run(path: Path, shape: Shape) -> Path:
    directory = RunDirectory(path)
    snip = shape.config.model_dump(mode="json")
    directory.start({"train_iters": shape.iterations, "note": shape.note, "snip": snip})
    write_events(directory, shape)
    return path


def _divergence(option: Option, weight: float) -> OptionDivergence:
    error = weight * sum(FORMAT_ERROR[name] for name in option.formats) / 3
    return OptionDivergence(error**2, error, error**2 + 0.1 * error, error, error)
