"""Events as scalars `snip/<group>/<quantity>_<unit>`, with the same names in every dashboard.

Unknown values (None, NaN, infinite) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_snip.divergence.quality import DivergenceTable
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.events import Event, Measurement, Metrics, Notice, PlanApplied


def scalars(event: Event) -> dict[str, float]:
    """Return the event's numbers by name."""
    match event.payload:
        case Measurement() as measured:
            values = {"snip/statistics/refresh_s": measured.seconds}
            values |= _divergence_totals(measured.divergences)
        case PlanApplied() as applied:
            values = _plan_values(applied.plan) | {
                **{f"snip/plan/share_{n}": s for n, s in applied.format_shares.items()},
                "snip/plan/changed_linears": applied.num_changed,
                "snip/plan/wait_s": applied.waited_s,
            }
        case Notice(kind, _):
            values = {f"snip/notices/{kind}": 1.0}
        case Metrics(metrics):
            values = {_metric_name(name): value for name, value in metrics.items()}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def divergence_values(table: DivergenceTable) -> dict[str, list[float]]:
    """Return {name: log10 over linears} of both divergences at the uniform lowest precision.

    Values that are zero or were not measured have no logarithm and are left out.
    """
    lowest = table.of_lowest()
    measures = {
        "snip/divergence/loss_log10": [d.loss_divergence for d in lowest],
        "snip/divergence/weight_log10": [d.weight_divergence for d in lowest],
    }
    return {
        name: [math.log10(v) for v in values if math.isfinite(v) and v > 0]
        for name, values in measures.items()
    }


def _divergence_totals(table: DivergenceTable) -> dict[str, float]:
    lowest = table.of_lowest()
    return {
        "snip/divergence/loss_total": sum(d.loss_divergence for d in lowest),
        "snip/divergence/weight_total": sum(d.weight_divergence for d in lowest),
    }


def _plan_values(plan: PrecisionPlan) -> dict[str, Any]:
    return {
        "snip/plan/quality_loss": plan.objective,
        "snip/plan/efficiency": plan.efficiency,
        "snip/plan/target": plan.target,
        "snip/plan/solve_s": plan.seconds,
    }


def _metric_name(name: str) -> str:
    group = "plan" if name == "lowest_precision_fraction" else "training"
    return f"snip/{group}/{name}"


def without(values: Mapping[str, float], names: frozenset[str]) -> dict[str, float]:
    """Return `values` less the training metrics `names`."""
    left_out = {_metric_name(name) for name in names}
    return {name: value for name, value in values.items() if name not in left_out}
