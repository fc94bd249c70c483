"""Pictures of a table show its numbers, read off the drawn shapes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from megatron_snip.comparison.curves import (
    departure,
    drawn_rows,
    finished_of,
    gap_against_time,
    gap_bars,
    gap_curves,
)
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.table import Table, make_tables
from megatron_snip.reporting.figures.canvas import HALF
from tests.unit.comparison.build import comparison, outcome

CONFIG = comparison(policies=("bf16", "random", "snip-linear"), targets=(0.5, 0.75))
ENTRIES = make_schedule(CONFIG).entries
GAPS = {"bf16": 0.0, "random": 0.05, "snip-linear": 0.02}
SHARES = {"bf16": {"bf16": 1.0}, "random": {"fp3": 1.0}, "snip-linear": {"fp8": 1.0}}


def outcomes() -> dict[str, Outcome]:
    """At 75 % gaps are twice those at 50 %."""
    return {
        e.run.key: dataclasses.replace(
            outcome(
                e.run.key,
                2.0 + GAPS[e.contender] * (1 + (e.target == 0.75)) + 0.3 * e.seed,
                (2.0 + GAPS[e.contender], 1.9 + 3 * GAPS[e.contender]),
            ),
            shares=SHARES[e.contender],
        )
        for e in ENTRIES
    }


def table(found: dict[str, Outcome], target: float = 0.5) -> Table:
    return next(t for t in make_tables(ENTRIES, found) if t.target == target)


def drawn(draw: Any, *args: Any) -> Any:
    """The first axes of a picture."""
    with HALF.style():
        return draw(HALF, *args).axes[0]


def test_a_departure_is_a_running_mean_of_differences_and_a_mean_over_seeds() -> None:
    runs = [
        (outcome("a", 2.0, (2.5, 2.1, 2.0)), 0),
        (outcome("b", 2.0, (2.1, 2.1, 2.4)), 1),
        (outcome("c", 2.0, (9.0, 9.0)), 2),  # other steps than its BF16: left out
    ]
    base = {seed: outcome("k", 2.0, (2.0, 2.0, 2.0)) for seed in range(3)}
    curve = departure(runs, base)
    assert curve is not None
    assert curve[0].tolist() == [6, 7, 8]
    assert curve[1] == pytest.approx([(0.5 + 0.1) / 2, (0.3 + 0.1) / 2, (0.2 + 0.2) / 2])
    assert departure(runs, {}) is None


def test_bars_are_gaps_and_one_that_is_not_finite_is_marked() -> None:
    found = outcomes()
    axes = drawn(gap_bars, table(found))
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([50.0, 20.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["random", "snip-linear"]
    assert axes.get_ylim() == (1.5, -0.5)
    assert not axes.texts

    for entry in ENTRIES:
        if entry.contender == "random":
            lost = dataclasses.replace(found[entry.run.key], validation_losses=(math.nan,))
            found[entry.run.key] = lost
    axes = drawn(gap_bars, table(found))
    assert [(t.get_text().strip(), t.get_position()[1]) for t in axes.texts] == [("not finite", 0)]


def test_curves_are_those_of_the_table() -> None:
    found = outcomes()
    axes = drawn(gap_curves, table(found), ENTRIES, found)
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["random"].get_ydata() == pytest.approx([50.0, 100.0])
    assert lines["snip-linear"].get_xdata().tolist() == [6, 7]


def test_points_are_gap_against_the_device_s_time() -> None:
    axes = drawn(gap_against_time, table(outcomes(), 0.75), "Blackwell")
    points = {c.get_label(): c.lines[0] for c in axes.containers}
    rows = {row.contender: row for row in drawn_rows(table(outcomes(), 0.75))}
    for name, point in points.items():
        x, y = point.get_xdata()[0], point.get_ydata()[0]
        assert (x, y) == pytest.approx((rows[name].step_time["Blackwell"], 2e3 * GAPS[name]))
    assert points.keys() == rows.keys()
    assert points["random"].get_xdata()[0] < points["snip-linear"].get_xdata()[0]
    star = next(line for line in axes.lines if line.get_label() == "bf16")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (1.0, 0.0)


def test_what_belongs_to_a_table() -> None:
    found = outcomes()
    here = finished_of(table(found), ENTRIES, found)
    assert {e.target for e in here} == {0.5} and len(here) == 6
    assert finished_of(table(found), ENTRIES, {}) == []
    only_random = {e.run.key: found[e.run.key] for e in ENTRIES if e.contender == "random"}
    assert drawn_rows(make_tables(ENTRIES, only_random)[0]) == ()
    assert np.isfinite(drawn_rows(table(found))[0].gap.mean)
