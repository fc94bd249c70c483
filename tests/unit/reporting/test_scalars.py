"""Names and values of scalars."""

import math
import time
from itertools import count

import pytest

from megatron_snip.reporting.events import Event, Metrics, Notice
from megatron_snip.reporting.writers import ScalarSeries
from tests.unit.reporting.runs import Shape, applied, config, measurement_at, plan_from

SHAPE = Shape(config())
MEASURED = measurement_at(SHAPE, 3)
PLAN = plan_from(SHAPE, MEASURED)


def test_the_first_names_answer_whether_training_is_safe_and_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = count(10.0, 10.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    series = ScalarSeries({"weight_lambda": 0.1})
    values: dict[str, float] = {}
    for payload in (
        Metrics({"loss": 4.0}),
        MEASURED,
        applied(SHAPE, PLAN, waited_s=0.25),
        Notice("refresh_failed", "why"),
        Notice("reverted", "why"),
        Metrics({"loss": 3.0, "lr": 0.5, "lowest_precision_fraction": 0.75}),
    ):
        values |= series.values(Event(4, payload))
    lowest = MEASURED.divergences.of_lowest()
    assert sorted(values.items()) == sorted(
        {
            "snip/1_loss": 3.0,
            "snip/3_lowest_precision_share": 0.75,
            "snip/share/fp4": PLAN.efficiency,
            "snip/share/fp8": 1 - PLAN.efficiency,
            "snip/2_quality_loss_share": (PLAN.objective or 0) / 1.1,
            "snip/refresh/target": PLAN.target,
            "snip/4_refresh_overhead_percent": 2.5,  # 0.25 s of 10 s
            "snip/refresh/failed": 1,
            "snip/1_guard_events": 1,
            "snip/refresh/changed_linears": 12,
            "snip/divergence/loss_total": sum(d.loss_divergence for d in lowest),
            "snip/divergence/weight_total": sum(d.weight_divergence for d in lowest),
            "snip/health/sqnr_db/input/median": 24.5,
            "snip/health/sqnr_db/input/worst": 19.0,
            "snip/health/underflow/input/median": 0.055,
            "snip/health/underflow/input/worst": 0.11,
            "snip/refresh/measure_s": 0.25,
            "snip/refresh/solve_s": 0.125,
            "snip/refresh/wait_s": 0.25,
            "snip/training/lr": 0.5,
        }.items()
    )


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text"])
def test_unknown_values_are_left_out(value: object) -> None:
    found = ScalarSeries({}, left_out=["grad_norm"]).values(
        Event(1, Metrics({"loss": value, "lr": 0.5, "grad_norm": 1.0}))
    )
    assert set(found) == {"snip/training/lr", "snip/refresh/failed", "snip/1_guard_events"}
    blind = PLAN.model_copy(update={"objective": None, "bound": None})
    values = ScalarSeries({}).values(Event(4, applied(SHAPE, blind)))
    assert "snip/2_quality_loss_share" not in values
