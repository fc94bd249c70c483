"""The loss guard: what is a spike after a plan change, and what is not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.loss_guard import GuardSettings, LossGuard, Verdict

SETTINGS = GuardSettings(steps=5, sigmas=6.0, rise=0.2, patience=3)
CURVES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "loss_curves.json").read_text(encoding="utf-8")
)["curves"]


def guard_after(losses: list[float]) -> LossGuard:
    guard = LossGuard()
    for loss in losses:
        guard = guard.heard(loss)
    return guard


def level_run(level: float = 2.0, noise: float = 0.01, count: int = 12) -> list[float]:
    return [level + noise * (-1) ** i for i in range(count)]


def test_without_a_change_nothing_is_judged() -> None:
    guard = guard_after(level_run())
    assert guard.verdict(math.nan, SETTINGS) is Verdict.CALM
    assert guard.verdict(1e9, SETTINGS) is Verdict.CALM


def test_the_bar_is_the_larger_of_rise_and_noise() -> None:
    quiet = guard_after(level_run(noise=0.01)).changed(SETTINGS).watch
    assert quiet is not None
    assert quiet.level == pytest.approx(2.0)
    assert quiet.bar == pytest.approx(2.4)
    # Differences 0, 1, 0, -1, ...: median 0, and half of them or more are 1 away from it.
    noisy = guard_after([2.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0]).changed(SETTINGS).watch
    assert noisy is not None
    assert noisy.bar > 2.4 * noisy.level / 2.0


def test_a_slope_is_not_noise() -> None:
    falling = guard_after([5.0 - 0.1 * i for i in range(16)]).changed(SETTINGS).watch
    assert falling is not None
    assert falling.level == pytest.approx(3.85)
    assert falling.bar == pytest.approx(1.2 * 3.85)


def test_noise_raises_the_bar() -> None:
    generator = random.Random(1)
    losses = [2.0 + generator.gauss(0.0, 0.2) for _ in range(16)]
    watch = guard_after(losses).changed(SETTINGS).watch
    assert watch is not None
    spread = (watch.bar - watch.level) / 6.0
    assert 0.1 < spread < 0.4


def test_few_losses_are_judged_by_the_largest() -> None:
    guard = guard_after([9.0, 5.0, 5.1]).changed(SETTINGS)
    assert guard.watch is not None
    assert guard.watch.level == 9.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_broken(loss: float) -> None:
    assert guard_after(level_run()).changed(SETTINGS).verdict(loss, SETTINGS) is Verdict.BROKEN


def test_a_run_that_was_broken_before_is_no_plans_fault() -> None:
    guard = guard_after([2.0, 2.0, math.nan]).changed(SETTINGS)
    assert guard.watch is None
    assert guard.verdict(math.nan, SETTINGS) is Verdict.CALM


def test_patience_ends() -> None:
    guard = guard_after(level_run()).changed(SETTINGS)
    verdicts = []
    for _ in range(3):
        verdicts.append(guard.verdict(3.0, SETTINGS))
        guard = guard.heard(3.0)
    assert verdicts == [Verdict.SUSPECT, Verdict.SUSPECT, Verdict.LASTING]


def test_only_a_return_forgives() -> None:
    high = guard_after(level_run()).changed(SETTINGS).heard(3.0).heard(3.0)
    assert high.heard(2.0).verdict(3.0, SETTINGS) is Verdict.SUSPECT
    assert high.heard(2.35).verdict(3.0, SETTINGS) is Verdict.LASTING  # not even halfway back


def test_a_second_try_shows_who_is_to_blame() -> None:
    guard = guard_after(level_run()).changed(SETTINGS)
    assert guard.blames(3.0, 2.1)
    assert not guard.blames(3.0, 2.9)
    assert not guard.blames(3.0, math.nan)


def test_the_watch_ends_and_not_in_a_run_of_high_losses() -> None:
    guard = guard_after(level_run()).changed(SETTINGS)
    for _ in range(5):
        guard = guard.heard(1.99)
    assert guard.watch is None
    assert guard.verdict(math.nan, SETTINGS) is Verdict.CALM
    guard = guard_after(level_run()).changed(SETTINGS)
    for _ in range(4):
        guard = guard.heard(2.0)
    guard = guard.heard(3.0).heard(3.0)
    assert guard.verdict(3.0, SETTINGS) is Verdict.LASTING


def test_high_losses_do_not_raise_the_level() -> None:
    guard = guard_after(level_run()).changed(SETTINGS).heard(3.0).heard(3.0)
    again = guard.changed(SETTINGS)
    assert again.watch is not None
    assert again.watch.level == pytest.approx(2.0)


def test_there_and_back() -> None:
    for guard in (LossGuard(), guard_after(level_run()), guard_after([2.0]).changed(SETTINGS)):
        assert LossGuard.from_dict(json.loads(json.dumps(guard.to_dict()))) == guard


@pytest.mark.parametrize("bad", [{"recent": [math.nan], "watch": None}, {"watch": None}])
def test_damage_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        LossGuard.from_dict(bad)


def default_settings() -> GuardSettings:
    c = SnipConfig()
    return GuardSettings(
        steps=c.guard_steps, sigmas=c.guard_sigmas, rise=c.guard_rise, patience=c.guard_patience
    )


def worst_verdicts(losses: list[float], change: int) -> set[Verdict]:
    """Verdicts on a run whose plan changes before step `change` (and does no harm)."""
    settings = default_settings()
    guard = guard_after(losses[:change]).changed(settings)
    found = set()
    for loss in losses[change:]:
        found.add(guard.verdict(loss, settings))
        guard = guard.heard(loss)
    return found


@pytest.mark.parametrize("curve", CURVES, ids=[str(c["seed"]) for c in CURVES])
def test_no_false_alarm_on_an_ordinary_run(curve: dict[str, Any]) -> None:
    losses = curve["losses"]
    for change in range(2, len(losses)):  # whenever the plan changes, harmlessly
        # A suspect step is tried again and, since the plan did no harm, comes out the same:
        # only these two verdicts would end a plan.
        assert not worst_verdicts(losses, change) & {Verdict.BROKEN, Verdict.LASTING}, change


def test_the_curves_have_what_makes_losses_jump() -> None:
    assert len(CURVES) == 20
    jumps = [
        max(b / min(c["losses"][:i]) for i, b in enumerate(c["losses"]) if i > 20) for c in CURVES
    ]
    assert sum(jump > 1.2 for jump in jumps) >= 10  # spikes of the learning rate show


def test_a_broken_plan_is_seen_on_every_curve() -> None:
    settings = default_settings()
    for curve in CURVES:
        losses = curve["losses"]
        for change in range(10, len(losses), 10):
            guard = guard_after(losses[:change]).changed(settings)
            assert guard.watch is not None
            bad = 2.0 * max(losses[max(0, change - 32) : change])
            assert guard.verdict(bad, settings) is Verdict.SUSPECT
            assert guard.blames(bad, losses[change])
