"""The saved view of W&B: its panels show series that SNIP logs. Nothing is sent."""

import runpy
from typing import Any

import pytest

from megatron_snip.reporting.events import Event, Metrics, Notice
from megatron_snip.reporting.scalars import ScalarSeries
from tests.processes import ROOT
from tests.unit.reporting.runs import Shape, applied, config, measurement_at, plan_from

pytest.importorskip("wandb_workspaces")

SHAPE = Shape(config(), iterations=16)
EVALUATED = {"eval/loss_increase": 0.1, "eval/loss_increase_error": 0.01}
OTHERS = {"lm loss", "snip/5_fragile_linears", "snip/6_plan", "snip/health/maps"}
"""Megatron's own series, and pictures."""


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "launch" / "wandb_workspace.py"))


def test_every_panel_shows_what_snip_logs(program: dict[str, Any]) -> None:
    series = ScalarSeries({"weight_lambda": 0.1, "formats": ["bf16", "fp8", "fp4"]})
    logged = set(OTHERS)
    plan = plan_from(SHAPE, measurement_at(SHAPE, 11))
    metrics = Metrics({"loss": 3.0, "lowest_precision_fraction": 0.75} | EVALUATED)
    for payload in (
        measurement_at(SHAPE, 3),
        applied(SHAPE, plan),
        Notice("guard", "why"),
        metrics,
    ):
        logged |= series.values(Event(4, payload)).keys()
    health = {name.rsplit("/", 2)[0] for name in logged if name.startswith("snip/health/")}
    for panels in program["SECTIONS"].values():
        for key in (key for keys in panels for key in keys):
            assert key in logged or key.rsplit("/", 2)[0] in health, key


def test_the_six_numbered_panels_come_first(program: dict[str, Any]) -> None:
    spec = program["workspace"]("team", "demo")._to_model().model_dump_json()
    numbered = (
        "snip/1_guard_events",
        "snip/2_quality_loss_share",
        "snip/3_lowest_precision_share",
        "snip/4_refresh_overhead_percent",
        "snip/5_fragile_linears",
        "snip/6_plan",
    )
    places = [spec.index(f'"{name}"') for name in numbered]
    assert places == sorted(places)
    assert max(places) < spec.index('"snip/share/bf16"')
