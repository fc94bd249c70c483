"""The report of a comparison: complete, self-contained, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_snip.comparison import report as report_module
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.report import make_comparison_report
from megatron_snip.comparison.run import Entry
from megatron_snip.comparison.schedule import Schedule, make_schedule
from megatron_snip.comparison.table import make_tables
from megatron_snip.reporting.report.build import Report
from megatron_snip.trainer.config import linear_shapes
from tests.unit.comparison.build import comparison, outcome
from tests.unit.reporting.report.test_build import Elements
from tests.unit.reporting.sketch import sketch

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")  # labels left no room

HOSTILE = "<script>alert(1)</script>{{ 7*7 }}"
CONFIG = comparison(
    policies=("bf16", "fp8", "random", "snip-linear", "snip-gemm"), targets=(0.5, 0.75)
)
NAMES = [shape.name for shape in linear_shapes(CONFIG.train_config())]
GAPS = {"bf16": 0.0, "fp8": 0.001, "random": 0.05, "snip-linear": 0.02, "snip-gemm": 0.01}
ALL = ["curves", "gaps", "linears", "time-0", "time-1"]


def kept(contender: str, seed: int) -> dict[str, dict[str, float]]:
    """What a contender's linears ran in."""
    if contender in ("bf16", "fp8"):
        return {name: {contender: 1.0} for name in NAMES}
    low = "fp8-fp3-fp3" if contender == "snip-gemm" else "fp3"
    found = {name: {"fp8": 0.25, low: 0.75} for name in NAMES}
    found[NAMES[seed]] = {"fp8": 1.0}
    return found


def outcomes_of(schedule: Schedule) -> dict[str, Outcome]:
    return {
        e.run.key: dataclasses.replace(
            outcome(e.run.key, 2.0 + GAPS[e.contender] + 0.01 * e.seed),
            options=kept(e.contender, e.seed),
        )
        for e in schedule.entries
    }


def report_of(found: dict[str, Outcome], entries: Sequence[Entry] | None = None) -> Report:
    entries = make_schedule(CONFIG).entries if entries is None else entries
    return make_comparison_report(make_tables(entries, found), entries, found, CONFIG)


def words(report: Report) -> str:
    """Text of a page, and what its pictures say to those who do not see them."""
    page = Elements(report.html)
    return page.text + " ".join(item.get("alt") or "" for item in page.all("img"))


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn once and not rendered."""
    monkeypatch.setattr(report_module, "render", sketch)


@pytest.mark.usefixtures("sketched")
def test_every_table_has_its_numbers_and_pictures() -> None:
    report = report_of(outcomes_of(make_schedule(CONFIG)))
    tables = ("forks-fp3-50", "forks-fp3-75")
    assert sorted(report.pictures) == sorted(f"{t}-{name}.png" for t in tables for name in ALL)
    text = words(report)
    for said in ("75 % of linear FLOPs in fp3", "+50.0", "5 contenders", "torch"):
        assert said in text
    assert "16 of 16 runs finished" in text  # tables share those of bf16 and fp8
    assert "random 50.0; snip-linear 20.0; snip-gemm 10.0" in text
    # Both seeds' protected linears, and none of the others.
    assert f"snip-linear keeps, the most first, {NAMES[0]}, {NAMES[1]}." in text
    assert all(f"speed: {device}" in text for device in ("Hopper", "Blackwell"))


@pytest.mark.usefixtures("sketched")
def test_the_page_asks_nobody_and_names_do_no_harm() -> None:
    schedule = make_schedule(CONFIG)
    entries = [
        dataclasses.replace(e, contender=HOSTILE if e.contender == "random" else e.contender)
        for e in schedule.entries
    ]
    page = Elements(report_of(outcomes_of(schedule), entries).html)
    assert not page.all("script") and "{{ 7*7 }}" in page.text
    sources = [item.get("src") or item.get("srcset") or "" for item in page.all("img")]
    assert sources and all(source.startswith("data:") for source in sources)


@pytest.mark.usefixtures("sketched")
def test_what_is_unknown_is_said() -> None:
    schedule = make_schedule(CONFIG)
    bare = {
        key: dataclasses.replace(found, options={}) for key, found in outcomes_of(schedule).items()
    }
    report = report_of(bare)
    assert not any("linears" in name for name in report.pictures)
    assert "what ran in which format is not known" in words(report)
    alone = {e.run.key: bare[e.run.key] for e in schedule.entries if e.contender == "bf16"}
    rest = {key: found for key, found in bare.items() if key not in alone}
    for part in (alone, rest):
        report = report_of(part)
        assert report.pictures == {}
        assert "a seed that BF16 has finished too" in words(report)


@pytest.mark.usefixtures("sketched")
def test_a_loss_that_is_not_finite_is_named() -> None:
    schedule = make_schedule(CONFIG)
    found = outcomes_of(schedule)
    for entry in schedule.entries:
        if entry.contender == "random":
            lost = dataclasses.replace(found[entry.run.key], validation_losses=(math.nan,))
            found[entry.run.key] = lost
    assert "Losses that are not finite: random." in words(report_of(found))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    schedule = make_schedule(CONFIG)
    entries = [e for e in schedule.entries if e.target == 0.5]
    report = report_of(outcomes_of(schedule), entries)
    for name in ALL:
        with Image.open(io.BytesIO(report.pictures[f"forks-fp3-50-{name}.png"])) as image:
            pixels: Any = image.convert("L").getextrema()
            assert image.width > 900 and pixels[0] < 128 < pixels[1]
    page = report.write(tmp_path / "report")
    assert page.read_text(encoding="utf-8") == report.html
