"""The controller's messages as scalars `snip/<room>/<quantity>_<unit>`, one name everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_snip.reporting.reporter import Applied, Refresh


def refresh_scalars(refresh: Refresh) -> dict[str, float]:
    """Return a refresh's scalars: its time, and both divergences of uniform lowest precision."""
    lowest = [list(linear.options.values())[-1] for linear in refresh.divergences.linears]
    return _finite(
        {
            "snip/statistics/refresh_s": refresh.seconds,
            "snip/statistics/num_linears": len(refresh.statistics.linears),
            "snip/divergence/loss_total": sum(d.loss_divergence for d in lowest),
            "snip/divergence/weight_total": sum(d.weight_divergence for d in lowest),
        }
    )


def plan_scalars(applied: Applied) -> dict[str, float]:
    """Return a plan's scalars: what it reaches, what it costs, how much it changed."""
    plan = applied.plan
    return _finite(
        {
            "snip/planning/objective": plan.objective,
            "snip/planning/bound": plan.bound,
            "snip/planning/efficiency": plan.efficiency,
            "snip/planning/solve_s": plan.seconds,
            "snip/planning/wait_s": applied.waited_s,
            "snip/planning/changed_linears": applied.num_changed,
        }
    )


def step_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's scalars: `snip/linears/lowest_precision_fraction`, `snip/training/...`."""
    rooms = {"lowest_precision_fraction": "linears"}
    named = {f"snip/{rooms.get(name, 'training')}/{name}": v for name, v in values.items()}
    return _finite(named)


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Leave out what is unknown: None, NaN and infinities."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
