"""The controller's messages as scalars `snip/<room>/<quantity>_<unit>`, one name everywhere.

Three kinds of numbers, told apart by what a step without news shows:

    of the plan in force and the last refresh   repeated at every step, so that any step can be read
    of the step itself                          refresh_s, wait_s, changed_linears: 0 without news
    of training                                 loss, grad_norm, ...: as the training loop gave them

What is unknown (None, NaN, infinite, not measured yet) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_snip.divergence.quality import DivergenceTable
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.reporter import Applied, Event, EventKind, Refresh
from megatron_snip.statistics.records import StatisticsTable

_OF_THE_STEP = {
    "snip/statistics/refresh_s": 0.0,
    "snip/planning/wait_s": 0.0,
    "snip/planning/changed_linears": 0.0,
}


_COUNTS: dict[EventKind, str] = {
    "kept": "snip/controller/num_kept_plans",
    "guard": "snip/controller/num_guard_events",
    "fallback": "snip/controller/num_fallbacks",
}
"""What counts the events of a kind since the process began."""


class StepScalars:
    """Hears what happens and returns each step's scalars."""

    def __init__(self) -> None:
        self._standing: dict[str, float] = dict.fromkeys(_COUNTS.values(), 0.0)
        self._step = dict(_OF_THE_STEP)
        self._divergences: DivergenceTable | None = None

    def refreshed(self, refresh: Refresh) -> None:
        """Note a refresh's time and totals."""
        self._step["snip/statistics/refresh_s"] = refresh.seconds
        self._divergences = refresh.divergences
        self._standing |= statistics_scalars(refresh.statistics)
        self._standing |= divergence_scalars(refresh.divergences)

    def planned(self, applied: Applied) -> None:
        """Note what a plan reaches, what it costs, how much it changed."""
        self._step["snip/planning/wait_s"] = applied.waited_s
        self._step["snip/planning/changed_linears"] = applied.num_changed
        for name in [key for key in self._standing if key.startswith("snip/planning/")]:
            del self._standing[name]  # what this plan does not know must not seem to be its own
        self._standing |= plan_scalars(applied.plan)
        if self._divergences is not None:
            self._standing |= choice_scalars(applied.plan, self._divergences)

    def event(self, event: Event) -> None:
        """Count it."""
        self._standing[_COUNTS[event.kind]] += 1

    def take(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return a step's scalars, and be ready for the next step.

        Args:
            values: what the training loop measured.
        """
        row = {**self._standing, **self._step, **training_scalars(values)}
        self._step = dict(_OF_THE_STEP)
        return row


def statistics_scalars(table: StatisticsTable) -> dict[str, float]:
    """Return the numbers of the table as a whole."""
    return _finite(
        {"snip/statistics/loss": table.loss, "snip/statistics/num_linears": len(table.linears)}
    )


def divergence_scalars(table: DivergenceTable) -> dict[str, float]:
    """Return both divergences, summed over linears, of the uniform lowest precision."""
    lowest = table.of_lowest()
    return _finite(
        {
            "snip/divergence/loss_total": sum(d.loss_divergence for d in lowest),
            "snip/divergence/weight_total": sum(d.weight_divergence for d in lowest),
        }
    )


def plan_scalars(plan: PrecisionPlan) -> dict[str, float]:
    """Return what a plan reaches and what it cost to make."""
    return _finite(
        {
            "snip/planning/objective": plan.objective,
            "snip/planning/bound": plan.bound,
            "snip/planning/efficiency": plan.efficiency,
            "snip/planning/target": plan.target,
            "snip/planning/solve_s": plan.seconds,
            "snip/planning/measured_iteration": plan.iteration,
        }
    )


def choice_scalars(plan: PrecisionPlan, table: DivergenceTable) -> dict[str, float]:
    """Return both divergences of the plan itself, summed over linears, as last measured.

    Options that were not measured (bf16 where it is not on offer) change nothing.
    """
    chosen = [
        linear.options[plan.linears[linear.name]]
        for linear in table.linears
        if plan.linears.get(linear.name) in linear.options
    ]
    return _finite(
        {
            "snip/divergence/plan_loss_total": sum(d.loss_divergence for d in chosen),
            "snip/divergence/plan_weight_total": sum(d.weight_divergence for d in chosen),
        }
    )


def training_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's metrics: `snip/linears/lowest_precision_fraction`, `snip/training/...`."""
    rooms = {"lowest_precision_fraction": "linears"}
    return _finite({f"snip/{rooms.get(name, 'training')}/{name}": v for name, v in values.items()})


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
