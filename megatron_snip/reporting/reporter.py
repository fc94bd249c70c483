"""What the controller tells the world; several reporters may listen, or none.

The controller calls a reporter on the reporting rank only, in this order within a step: `planned`
when a plan is applied, `refreshed` after measuring, `event` whenever something is out of the
ordinary, `metrics` at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from megatron_snip.divergence.quality import DivergenceTable, divergences_dict
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.statistics.records import StatisticsTable


@dataclass(frozen=True)
class Refresh:
    """What a refresh measured.

    Attributes:
        step: training step (0-based).
        statistics: the reduced statistics.
        divergences: computed from them.
        problem: the planner's problem.
        seconds: wall time of the measurement.
    """

    step: int
    statistics: StatisticsTable
    divergences: DivergenceTable
    problem: PlanningProblem
    seconds: float


@dataclass(frozen=True)
class Applied:
    """A plan that every rank has applied.

    Attributes:
        plan: the plan.
        step: training step (0-based) before which it was applied.
        num_changed: linears whose option changed.
        waited_s: seconds that training waited for the solver.
        resumed: whether a stopped run goes on with it, from `step`.
    """

    plan: PrecisionPlan
    step: int
    num_changed: int
    waited_s: float
    resumed: bool = False


EventKind = Literal["kept", "guard", "fallback"]
"""kept: a refresh or a solve came to nothing and the old plan stays; guard: the loss guard saw a
spike or a NaN; fallback: a plan was put in force because of that."""


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary.

    Attributes:
        step: training step (0-based).
        kind: see `EventKind`.
        message: one line for people.
    """

    step: int
    kind: EventKind
    message: str


class Reporter(Protocol):
    """Listens to the controller."""

    def refreshed(self, refresh: Refresh) -> None:
        """A refresh has measured the model."""

    def planned(self, applied: Applied) -> None:
        """A plan has been applied."""

    def event(self, event: Event) -> None:
        """Something out of the ordinary has happened."""

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """A training step has ended."""

    def close(self) -> None:
        """The run ends; nothing follows."""


@runtime_checkable
class KeepsPrecision(Protocol):
    """A reporter that also keeps what linears resolved to (`--snip-precision-log`)."""

    def precision(self, step: int, table: dict[str, Any]) -> None:
        """A plan is in force from `step` on; `table` is a `PrecisionTable` as plain types."""


def tell_precision(reporter: Reporter, step: int, table: dict[str, Any]) -> None:
    """Tell a reporter what linears resolved to, if it keeps that."""
    if isinstance(reporter, KeepsPrecision):
        reporter.precision(step, table)


class NullReporter:
    """Listens and does nothing."""

    def refreshed(self, refresh: Refresh) -> None:
        """Nothing."""

    def planned(self, applied: Applied) -> None:
        """Nothing."""

    def event(self, event: Event) -> None:
        """Nothing."""

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class FileReporter:
    """Writes to a run directory; see `run_directory.py` for what a step's line holds."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._told: dict[str, Any] = {}
        self._since = time.perf_counter()

    def refreshed(self, refresh: Refresh) -> None:
        """Write the problem and the divergences behind it."""
        self._told["refresh_s"] = refresh.seconds
        table = divergences_dict(refresh.divergences, refresh.statistics)
        self.directory.divergences(refresh.step, table)
        self.directory.problem(refresh.step, refresh.problem)

    def planned(self, applied: Applied) -> None:
        """Write the plan, unless a run goes on with it here, where it was applied."""
        if applied.resumed and self.directory.has_plan(applied.plan.iteration):
            return
        self._told |= {
            "plan_step": applied.plan.iteration,
            "changed_linears": applied.num_changed,
            "wait_s": applied.waited_s,
        }
        self.directory.plan(applied.plan)

    def precision(self, step: int, table: dict[str, Any]) -> None:
        """Write what the linears resolved to."""
        self.directory.precision(step, table)

    def event(self, event: Event) -> None:
        """Keep it for the step's line."""
        told = {"kind": event.kind, "message": event.message}
        self._told["events"] = [*self._told.get("events", []), told]

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append the step's metrics, with what was told since the last ones and the time since."""
        now = time.perf_counter()
        self.directory.metrics({"step": step, **values, "wall_s": now - self._since, **self._told})
        self._told, self._since = {}, now

    def close(self) -> None:
        """Flush and close the files."""
        self.directory.close()


class Reporters:
    """Passes everything on to several reporters, in order.

    One that fails does not keep it from the others; the first error is raised afterwards.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def refreshed(self, refresh: Refresh) -> None:
        """Pass on."""
        self._each(lambda reporter: reporter.refreshed(refresh))

    def planned(self, applied: Applied) -> None:
        """Pass on."""
        self._each(lambda reporter: reporter.planned(applied))

    def event(self, event: Event) -> None:
        """Pass on."""
        self._each(lambda reporter: reporter.event(event))

    def precision(self, step: int, table: dict[str, Any]) -> None:
        """Pass on to those that keep it."""
        self._each(lambda reporter: tell_precision(reporter, step, table))

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Pass on."""
        self._each(lambda reporter: reporter.metrics(step, values))

    def close(self) -> None:
        """Close all."""
        self._each(lambda reporter: reporter.close())

    def _each(self, message: Callable[[Reporter], None]) -> None:
        errors = []
        for reporter in self._reporters:
            try:
                message(reporter)
            except Exception as error:  # a full disk must not silence the dashboard
                errors.append(error)
        if errors:
            raise errors[0]
