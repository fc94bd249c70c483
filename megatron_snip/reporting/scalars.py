"""The scalars of a run, as TensorBoard and Weights & Biases show them.

Dashboards sort by name. The most important panels are numbered: is training safe, how much runs in
the lowest precision and at what cost, which linears suffer:

    snip/1_guard_events              loss spikes since the job started; a reverted plan had one
    snip/1_loss                      training loss (Megatron's own run has it as `lm loss`)
    snip/2_quality_loss_share        the plan's quality loss; 1 + weight_lambda, that of the
                                     uniform lowest precision, is shown as 1, and BF16 is 0
    snip/3_lowest_precision_share    share of the linears' FLOPs in the lowest precision
    snip/4_refresh_overhead_percent  time that a refresh added, of the time since the last refresh
    snip/5_fragile_linears           picture: divergences of each linear
    snip/6_plan                      picture: format of each linear
    snip/refresh/target              efficiency target of the plan
    snip/share/<format>              share of the linears' FLOPs in each format, at every plan
    snip/eval/loss_increase          loss under the plan minus that in BF16, on the same samples
    snip/eval/loss_increase_error    its standard error over microbatches
    snip/eval/loss_divergence        the plan's loss divergence by the measurements so far; a score
    snip/eval/<name>_loss_...        the same of final_validation and test, after training
    snip/linear/<name>/quality_loss  of a linear in the lowest precision; of the ten that had the
                                     largest in the run's first refresh
    snip/linear/<name>/bits          of the same: mean bits of its three GEMMs, at every plan
    snip/health/<measure>/<operand>/<worst or median>    over linears, in the lowest precision
    snip/health/gradient_noise/...   worst and median over linears in the lowest precision; of the
                                     plan that runs
    snip/divergence/..., snip/refresh/..., snip/training/...   details

Unknown values (None, NaN, infinite) are left out.
"""

import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megatron_snip.config import AUTO
from megatron_snip.options import formats_in
from megatron_snip.reporting.events import (
    Event,
    Measurement,
    Metrics,
    Notice,
    PlanApplied,
    Settings,
)
from megatron_snip.types import Gemm

MEGATRON_LOGS = frozenset({"loss", "grad_norm", "lr", "validation_loss"})
"""Metrics that Megatron logs itself."""

_NUMBERED_METRICS = {"loss": "1_loss", "lowest_precision_fraction": "3_lowest_precision_share"}


class ScalarSeries:
    """Turns a run's events into scalars; counts failures and times refreshes."""

    def __init__(self, config: Mapping[str, Any], left_out: Collection[str] = ()) -> None:
        """Start counting.

        Args:
            config: SNIP's settings as plain values.
            left_out: Names (in `Metrics`) of training metrics that are not wanted.
        """
        self._uniform_loss = 1.0 + float(config.get("weight_lambda", 0.0))
        self._left_out = frozenset(left_out)
        # Formats that have a series: those of the settings and of all plans so far.
        entries = [entry for entry in config.get("formats", ()) if entry != AUTO]
        self._formats = set(formats_in(entries))
        self._last_refresh: float | None = None  # seconds; before a refresh, of the first event
        self._watched: tuple[str, ...] = ()
        self._failed = 0
        self._guarded = 0

    def values(self, event: Event) -> dict[str, float]:
        """Return the event's numbers by name; call it once for every event, in order."""
        now = time.perf_counter()
        if self._last_refresh is None:
            self._last_refresh = now
        match event.payload:
            case Measurement() as measured:
                elapsed = now - self._last_refresh
                self._last_refresh = now
                found = self._of_measurement(measured, elapsed)
            case PlanApplied() as applied:
                found = self._of_plan(applied)
            case Notice(kind, _):
                self._failed += kind == "refresh_failed"
                self._guarded += kind == "guard"
                found = self._counters()
            case Metrics(values=metrics):
                found = self._of_metrics(metrics)
            case Settings():
                found = {}
        return {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def _of_measurement(self, measured: Measurement, elapsed_s: float) -> dict[str, Any]:
        overhead = 100.0 * measured.seconds / elapsed_s if elapsed_s > 0 else None
        lowest = measured.divergences.of_lowest()
        found: dict[str, Any] = {
            "snip/divergence/loss_total": _finite_sum(each.loss_divergence for each in lowest),
            "snip/divergence/weight_total": _finite_sum(each.weight_divergence for each in lowest),
            "snip/4_refresh_overhead_percent": overhead,
            "snip/refresh/measure_s": measured.seconds,
            "snip/health/gradient_noise/plan": measured.gradient_noise,
        }
        for name, value in measured.health.summary().items():
            found[f"snip/health/{name}"] = value
        by_name = dict(zip(measured.divergences.linears, lowest, strict=True))
        self._watched = tuple(name for name in measured.watched if name in by_name)
        for name in self._watched:
            found[f"snip/linear/{name}/quality_loss"] = by_name[name].quality_loss
        return found

    def _of_plan(self, applied: PlanApplied) -> dict[str, Any]:
        plan = applied.plan
        shares = applied.format_shares
        self._formats |= shares.keys()
        # A format that a plan stops using gets a 0, or its series would keep the old value.
        found: dict[str, Any] = {
            f"snip/share/{name}": shares.get(name, 0.0) for name in self._formats
        }
        for name in self._watched:
            found[f"snip/linear/{name}/bits"] = plan.linears[name].bits / len(Gemm)
        if plan.objective is not None:
            found["snip/2_quality_loss_share"] = plan.objective / self._uniform_loss
        found |= {
            "snip/refresh/changed_linears": applied.num_changed,
            "snip/refresh/target": plan.target,
            "snip/refresh/solve_s": plan.seconds,
            "snip/refresh/wait_s": applied.waited_s,
        }
        return found

    def _of_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in metrics.items():
            if name not in self._left_out:
                found[f"snip/{_metric_name(name)}"] = value
        return found | self._counters()

    def _counters(self) -> dict[str, Any]:
        return {"snip/refresh/failed": self._failed, "snip/1_guard_events": self._guarded}


def _finite_sum(values: Iterable[float]) -> float | None:
    """Return the sum without the linears that have no finite value; None if no linear has one."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) if finite else None


def _metric_name(name: str) -> str:
    """Return the name of a training metric below `snip/`; that of an evaluation is its own.

    `run/evaluation.py` makes those: they contain `/`.
    """
    if name in _NUMBERED_METRICS:
        return _NUMBERED_METRICS[name]
    return name if "/" in name else f"training/{name}"
