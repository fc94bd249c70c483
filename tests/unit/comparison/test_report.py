"""The report of a comparison: complete, self-contained, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_snip.comparison import report as report_module
from megatron_snip.comparison.low_shares import low_shares
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.report import make_comparison_report
from megatron_snip.comparison.schedule import Schedule, make_schedule
from megatron_snip.comparison.settings import ComparisonConfig
from megatron_snip.comparison.table import make_tables
from megatron_snip.reporting.report.build import Report
from megatron_snip.trainer.sizes import linear_shapes
from tests.unit.comparison.build import comparison, outcome
from tests.unit.reporting.report.test_build import Elements
from tests.unit.reporting.sketch import sketch

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")  # labels left no room

HOSTILE = "<script>alert(1)</script>{{ 7*7 }}"
CONFIG = comparison(
    policies=("bf16", "fp8", "random", "snip-linear", "snip-gemm", HOSTILE),
    contenders={HOSTILE: {"weight_lambda": 0.5}},
    targets=(0.5, 0.75),
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
            outcome(e.run.key, 2.0 + GAPS.get(e.contender, 0.03) + 0.01 * e.seed),
            options=kept(e.contender, e.seed),
        )
        for e in schedule.entries
    }


def report_of(config: ComparisonConfig, found: dict[str, Outcome]) -> Report:
    entries = make_schedule(config).entries
    return make_comparison_report(make_tables(entries, found), entries, found, config)


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn once and not rendered."""
    monkeypatch.setattr(report_module, "render", sketch)


@pytest.mark.usefixtures("sketched")
def test_every_table_has_its_numbers_and_pictures() -> None:
    report = report_of(CONFIG, outcomes_of(make_schedule(CONFIG)))
    tables = ("forks-fp3-50", "forks-fp3-75")
    assert sorted(report.pictures) == sorted(f"{t}-{name}.png" for t in tables for name in ALL)
    text = Elements(report.html).text
    for words in ("75 % of linear FLOPs in fp3", "snip-gemm", "+50.0", "contenders", "torch"):
        assert words in text
    assert "24 of 24 runs finished" not in text  # the 50 and 75 % tables share bf16 and fp8
    assert "20 of 20 runs finished" in text


@pytest.mark.usefixtures("sketched")
def test_the_page_asks_nobody_and_names_do_no_harm() -> None:
    page = Elements(report_of(CONFIG, outcomes_of(make_schedule(CONFIG))).html)
    assert not page.all("script") and "{{ 7*7 }}" in page.text
    sources = [item.get("src") or item.get("srcset") or "" for item in page.all("img")]
    assert sources and all(source.startswith("data:") for source in sources)


@pytest.mark.usefixtures("sketched")
def test_what_is_unknown_is_left_out_or_said() -> None:
    schedule = make_schedule(CONFIG)
    bare = {
        key: dataclasses.replace(found, options={}) for key, found in outcomes_of(schedule).items()
    }
    assert not any("linears" in name for name in report_of(CONFIG, bare).pictures)
    alone = {e.run.key: bare[e.run.key] for e in schedule.entries if e.contender == "bf16"}
    report = report_of(CONFIG, alone)
    assert report.pictures == {}
    assert "Nothing but BF16 has finished" in Elements(report.html).text


def test_shares_are_by_gemm_and_a_mean_over_seeds() -> None:
    schedule = make_schedule(CONFIG)
    found = outcomes_of(schedule)
    table = make_tables(schedule.entries, found)[0]
    shares = low_shares(table, schedule.entries, found)
    assert list(shares) == ["random", "snip-linear", "snip-gemm", HOSTILE]  # fp8 treats all alike
    assert shares["snip-linear"][NAMES[0]] == pytest.approx((0.375,) * 3)
    assert shares["snip-linear"][NAMES[-1]] == pytest.approx((0.75,) * 3)
    assert shares["snip-gemm"][NAMES[-1]] == pytest.approx((0.0, 0.75, 0.75))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"targets": (0.5,)})
    report = report_of(config, outcomes_of(make_schedule(config)))
    for name in ALL:
        with Image.open(io.BytesIO(report.pictures[f"forks-fp3-50-{name}.png"])) as image:
            pixels: Any = image.convert("L").getextrema()
            assert image.width > 900 and pixels[0] < 128 < pixels[1]
    page = report.write(tmp_path / "report")
    assert page.read_text(encoding="utf-8") == report.html
