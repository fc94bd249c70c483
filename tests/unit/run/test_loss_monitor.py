"""The judgement of losses after a plan change."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.run.loss_monitor import PATIENCE, WATCHED_ITERATIONS, LossMonitor

SIGMAS = 6.0
CURVES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "loss_curves.json").read_text(encoding="utf-8")
)["curves"]
STEADY = [2.0 + 0.01 * (-1) ** i for i in range(12)]


def after(losses: list[float], monitor: LossMonitor | None = None) -> LossMonitor:
    monitor = monitor or LossMonitor()
    for loss in losses:
        monitor = monitor.add(loss)
    return monitor


def watching(losses: list[float]) -> Any:
    return after(losses).after_plan_change(SIGMAS)


def test_the_limit_is_a_fifth_above_the_level_or_six_sigmas_of_noise() -> None:
    assert watching(STEADY).watch.limit == pytest.approx(2.4)
    assert watching([2.0, 2.0, *[3.0, 2.0] * 4]).watch.limit > 3.0
    slope = watching([5.0 - 0.1 * i for i in range(16)])
    assert slope.watch.limit == pytest.approx(1.2 * 3.85)
    assert watching([9.0, 5.0, 5.1]).watch.level == 9.0  # of few losses the largest


def test_nothing_is_judged_without_a_plan_change_or_after_a_broken_run() -> None:
    assert not after(STEADY).is_spike(math.nan) and not after(STEADY).is_spike(1e9)
    assert watching([2.0, 2.0, math.nan]).watch is None


HIGH = [3.0] * (PATIENCE - 1)


@pytest.mark.parametrize(
    ("since", "loss", "second", "blamed"),
    [
        *(([], loss, 2.0, True) for loss in (math.nan, math.inf, -math.inf)),
        ([], math.nan, math.nan, False),
        ([], 3.0, 2.1, True),  # the second run undoes half of the rise
        ([], 3.0, 2.9, False),
        ([], 3.0, math.nan, False),
        (HIGH[1:], 3.0, 3.0, False),
        (HIGH, 3.0, 3.0, True),  # it lasts
        (HIGH, 3.0, math.nan, False),
        ([*HIGH, 2.0], 3.0, 3.0, False),  # it returned
        ([*HIGH, 2.35], 3.0, 3.0, True),  # not even halfway
    ],
)
def test_a_spike_blames_the_plan_if_a_second_run_is_better_or_it_lasts(
    since: list[float], loss: float, second: float, blamed: bool
) -> None:
    monitor = after(since, watching(STEADY))
    assert monitor.is_spike(loss) and monitor.blames_plan(loss, second) == blamed


def test_judging_ends_but_not_within_a_series_of_high_losses() -> None:
    assert after([1.99] * WATCHED_ITERATIONS, watching(STEADY)).watch is None
    monitor = after([2.0] * (WATCHED_ITERATIONS - 1) + [3.0, 3.0], watching(STEADY))
    assert monitor.watch is not None
    # After the spike the loss neither returns nor is above the limit of 2.4.
    monitor = after([3.0, *[2.3] * (2 * WATCHED_ITERATIONS - 2)], watching(STEADY))
    assert monitor.watch is not None
    assert after([2.3], monitor).watch is None


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
