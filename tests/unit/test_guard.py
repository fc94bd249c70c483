"""The guard's judgement of losses after a plan change."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.guard import PATIENCE, WATCHED_ITERATIONS, LossMonitor

SIGMAS = 6.0
CURVES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "loss_curves.json").read_text(encoding="utf-8")
)["curves"]
STEADY = [2.0 + 0.01 * (-1) ** i for i in range(12)]


def after(losses: list[float], monitor: LossMonitor | None = None) -> LossMonitor:
    monitor = LossMonitor() if monitor is None else monitor
    for loss in losses:
        monitor = monitor.add(loss)
    return monitor


def watching(losses: list[float]) -> LossMonitor:
    return after(losses).after_plan_change(SIGMAS)


def limit(losses: list[float]) -> float:
    watch = watching(losses).watch
    assert watch is not None
    return watch.limit


def test_without_a_plan_change_no_loss_is_a_spike() -> None:
    assert not after(STEADY).is_spike(math.nan)
    assert not after(STEADY).is_spike(1e9)


def test_the_limit_is_a_fifth_above_the_level_or_six_sigmas_of_noise() -> None:
    assert limit(STEADY) == pytest.approx(2.4)
    assert limit([2.0, 2.0, *[3.0, 2.0] * 4]) > 3.0
    assert limit([5.0 - 0.1 * i for i in range(16)]) == pytest.approx(1.2 * 3.85)  # a slope
    few = watching([9.0, 5.0, 5.1]).watch
    assert few is not None and few.level == 9.0  # of few losses the largest


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_blames_the_plan_if_the_second_run_is_finite(loss: float) -> None:
    assert watching(STEADY).is_spike(loss)
    assert watching(STEADY).blames_plan(loss, 2.0)
    assert not watching(STEADY).blames_plan(loss, math.nan)


def test_a_run_that_was_broken_before_is_not_judged() -> None:
    assert watching([2.0, 2.0, math.nan]).watch is None


def test_a_second_run_that_undoes_half_of_the_rise_blames_the_plan() -> None:
    monitor = watching(STEADY)
    assert monitor.blames_plan(3.0, 2.1)
    assert not monitor.blames_plan(3.0, 2.9)
    assert not monitor.blames_plan(3.0, math.nan)


def test_lasting_high_losses_blame_the_plan() -> None:
    high = [3.0] * (PATIENCE - 1)
    assert not after(high[1:], watching(STEADY)).blames_plan(3.0, 3.0)
    assert after(high, watching(STEADY)).blames_plan(3.0, 3.0)
    assert not after([*high, 2.0], watching(STEADY)).blames_plan(3.0, 3.0)  # it returned
    assert after([*high, 2.35], watching(STEADY)).blames_plan(3.0, 3.0)  # not even halfway


def test_judging_ends_but_not_within_a_series_of_high_losses() -> None:
    assert after([1.99] * WATCHED_ITERATIONS, watching(STEADY)).watch is None
    monitor = after([2.0] * (WATCHED_ITERATIONS - 1) + [3.0, 3.0], watching(STEADY))
    assert monitor.watch is not None


@pytest.mark.parametrize("curve", CURVES, ids=[str(c["seed"]) for c in CURVES])
def test_an_ordinary_run_reverts_no_plan(curve: dict[str, Any]) -> None:
    losses = curve["losses"]
    for change in range(2, len(losses)):  # whenever the plan changes, harmlessly
        monitor = watching(losses[:change])
        for loss in losses[change:]:
            # The plan did no harm, so a second run gives the same loss.
            assert not monitor.is_spike(loss) or not monitor.blames_plan(loss, loss), change
            monitor = monitor.add(loss)


def test_a_broken_plan_is_found_on_every_curve() -> None:
    for curve in CURVES:
        losses = curve["losses"]
        for change in range(10, len(losses), 10):
            monitor = watching(losses[:change])
            bad = 2.0 * max(losses[max(0, change - 32) : change])
            assert monitor.is_spike(bad)
            assert monitor.blames_plan(bad, losses[change])
