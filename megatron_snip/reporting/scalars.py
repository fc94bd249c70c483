"""Events as scalars, with the same names in TensorBoard and W&B.

Dashboards sort by name. The most important panels are numbered: is training safe, how much runs in
the lowest precision and at what cost, which linears suffer:

    snip/1_guard_events              since the job started: bad losses and plans reverted
    snip/1_loss                      training loss (Megatron's own run has it as `lm loss`)
    snip/2_quality_loss_share        of the plan; 1 is the uniform lowest precision, 0 is BF16
    snip/3_lowest_precision_share    share of the linears' FLOPs in the lowest precision
    snip/4_refresh_overhead_percent  time that a refresh added, of the time since the last refresh
    snip/5_fragile_linears           picture: divergences of each linear
    snip/6_plan                      picture: format of each linear
    snip/refresh/target              efficiency target of the plan
    snip/share/<format>              share of the linears' FLOPs in each format, at every plan
    snip/eval/loss_increase          loss under the plan minus that in BF16, on the same samples
    snip/eval/loss_increase_error    its standard error over microbatches
    snip/eval/loss_divergence        of the plan, by the last measurement; a score
    snip/health/<measure>/<operand>/<worst or median>    over linears, in the lowest precision
    snip/divergence/..., snip/refresh/..., snip/training/...   details

Unknown values (None, NaN, infinite) are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import Any

from megatron_snip.reporting.events import Event, Measurement, Metrics, Notice, PlanApplied

_METRIC_NAMES = {"loss": "1_loss", "lowest_precision_fraction": "3_lowest_precision_share"}


class ScalarSeries:
    """Turns a run's events into scalars; counts failures and times refreshes."""

    def __init__(self, config: Mapping[str, Any], left_out: Collection[str] = ()) -> None:
        """Start counting.

        Args:
            config: SNIP's settings as plain values.
            left_out: training metrics that are not wanted, by their names in `Metrics`.
        """
        self._uniform_loss = 1.0 + float(config.get("weight_lambda", 0.0))
        self._left_out = frozenset(left_out)
        self._last_refresh: float | None = None  # or the first event
        self._failed = self._guarded = 0

    def values(self, event: Event) -> dict[str, float]:
        """Return the event's numbers by name; call it once for every event, in order."""
        now = time.perf_counter()
        if self._last_refresh is None:
            self._last_refresh = now
        match event.payload:
            case Measurement() as measured:
                elapsed, self._last_refresh = now - self._last_refresh, now
                overhead = 100.0 * measured.seconds / elapsed if elapsed > 0 else None
                lowest = measured.divergences.of_lowest()
                found = {
                    "snip/divergence/loss_total": sum(d.loss_divergence for d in lowest),
                    "snip/divergence/weight_total": sum(d.weight_divergence for d in lowest),
                    "snip/4_refresh_overhead_percent": overhead,
                    "snip/refresh/measure_s": measured.seconds,
                }
                summary = measured.health.summary()
                found |= {f"snip/health/{name}": value for name, value in summary.items()}
            case PlanApplied() as applied:
                loss = applied.plan.objective
                found = {f"snip/share/{n}": share for n, share in applied.format_shares.items()}
                found |= {
                    "snip/2_quality_loss_share": loss and loss / self._uniform_loss,
                    "snip/refresh/changed_linears": applied.num_changed,
                    "snip/refresh/target": applied.plan.target,
                    "snip/refresh/solve_s": applied.plan.seconds,
                    "snip/refresh/wait_s": applied.waited_s,
                }
            case Notice(kind, _):
                self._failed += kind == "refresh_failed"
                self._guarded += kind in ("guard", "reverted")
                found = self._counters()
            case Metrics(metrics):
                wanted = {k: v for k, v in metrics.items() if k not in self._left_out}
                own = {k: k if "/" in k else f"training/{k}" for k in wanted}
                names = own | _METRIC_NAMES
                found = {f"snip/{names[k]}": v for k, v in wanted.items()} | self._counters()
        return {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def _counters(self) -> dict[str, Any]:
        return {"snip/refresh/failed": self._failed, "snip/1_guard_events": self._guarded}
