"""Gaps are taken pair by pair, so what a seed does to everybody drops out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest

from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.table import Row, Table, make_tables
from megatron_snip.comparison.text import columns, markdown, to_json
from tests.unit.comparison.build import comparison, outcome

NAMES = ("bf16", "random", "snip-linear")
CONFIG = comparison(policies=NAMES, seeds=3)
SCHEDULE = make_schedule(CONFIG)
SEED_EFFECT = (0.0, 0.7, -0.4)
GAP = {"bf16": (0.0, 0.0, 0.0), "random": (0.04, 0.05, 0.06), "snip-linear": (0.01, 0.01, 0.01)}


def outcomes(**losses: tuple[float, ...]) -> dict[str, Outcome]:
    return {
        e.run.key: outcome(
            e.run.key,
            2.0 + SEED_EFFECT[e.seed] + GAP[e.contender][e.seed],
            losses.get(e.contender.replace("-", "_"), (2.0, 1.9)),
        )
        for e in SCHEDULE.entries
    }


def row(found: Mapping[str, Outcome], name: str) -> Row:
    (table,) = make_tables(SCHEDULE.entries, found)
    return next(r for r in table.rows if r.contender == name)


def test_gaps_are_differences_of_pairs() -> None:
    random = row(outcomes(), "random")
    assert random.gap.mean == pytest.approx(0.05)
    assert random.gap.deviation == pytest.approx(0.01)
    assert random.gap.error == pytest.approx(0.01 / math.sqrt(3))
    assert random.over_rival.mean == pytest.approx(0.04)
    assert random.relative_gap == pytest.approx(0.05 / 2.1)
    assert random.validation.deviation > 0.5, "seeds differ far more than contenders"
    assert row(outcomes(), "snip-linear").share_of_yardstick == pytest.approx(0.2)
    assert row(outcomes(), "bf16").gap.mean == 0.0


def test_only_seeds_that_both_have_are_compared() -> None:
    found = outcomes()
    keys = {(e.contender, e.seed): e.run.key for e in SCHEDULE.entries}
    del found[keys["bf16", 2]]
    random = row(found, "random")
    assert random.seeds == 3
    assert random.gap.count == 2
    assert random.gap.mean == pytest.approx(0.045)
    assert random.over_rival.count == 3
    assert random.relative_gap == pytest.approx(0.045 / 2.35)


def test_training_gap_is_a_mean_over_steps_and_divergence_is_counted_by_step() -> None:
    found = outcomes(random=(2.3, math.nan), snip_linear=(2.1, 2.5))
    snip = row(found, "snip-linear")
    assert snip.training_gap.mean == pytest.approx(0.35)
    assert snip.diverged_steps == 3  # 0.6 above at the second step of three seeds
    random = row(found, "random")
    assert math.isnan(random.training_gap.mean)
    assert random.diverged_steps == 3


def test_what_has_not_finished_is_left_out() -> None:
    assert make_tables(SCHEDULE.entries, {}) == ()
    first = SCHEDULE.entries[0]
    (table,) = make_tables(SCHEDULE.entries, {first.run.key: outcome(first.run.key, 2.0)})
    assert [r.contender for r in table.rows] == ["bf16"]


def test_text_has_a_cell_for_every_heading() -> None:
    (table,) = make_tables(SCHEDULE.entries, outcomes())
    head, *rows = columns(table)
    assert all(len(cells) == len(head) for cells in rows)
    text = markdown([table])
    assert "### forks, 75 % of linear FLOPs in fp3" in text
    assert "| random | 3 | 75.0 % | 2.1500 | +50.0 +- 10.0 | 2.38 |" in text


def test_json_holds_no_nan() -> None:
    found = outcomes(random=(math.nan, 1.0))
    value = to_json(make_tables(SCHEDULE.entries, found), CONFIG)
    assert value["tables"][0]["rows"][1]["training_gap"]["mean"] is None
    assert "NaN" not in str(value).replace("nan", "NaN")


def test_an_empty_table_has_headings() -> None:
    assert len(columns(Table("forks", "fp3", 0.75, ()))) == 1


def test_the_lowest_format_is_the_tables_and_not_the_runs() -> None:
    schedule = make_schedule(comparison(policies=("bf16", "fp8", "lowest"), seeds=1))
    found = {e.run.key: uniform(e.run.key, e.contender) for e in schedule.entries}
    (table,) = make_tables(schedule.entries, found)
    assert [r.lowest_fraction for r in table.rows] == [0.0, 0.0, 1.0]


def uniform(key: str, name: str) -> Outcome:
    return dataclasses.replace(outcome(key, 2.0), shares={name: 1.0}, lowest_fraction=1.0)
