"""Names and values of scalars; TensorBoard's files, read back with its own reader; W&B's rows."""

import importlib.util
import math
import re
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_snip.divergence.quality_loss import OptionDivergence
from megatron_snip.errors import UsageError
from megatron_snip.log import forget_warnings
from megatron_snip.reporting import writers
from megatron_snip.reporting.events import Event, Metrics, Notice, PlanApplied, Reporter
from megatron_snip.reporting.scalars import MEGATRON_LOGS, ScalarSeries
from megatron_snip.reporting.writers import TensorBoardWriter, WandbWriter, start_wandb
from tests.unit.reporting.runs import (
    Shape,
    applied,
    config,
    measurement_at,
    plan_from,
    write_events,
)

wandb = pytest.importorskip("wandb")
layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

SHAPE = Shape(config(), iterations=16, notices=((7, Notice("reverted", "back to <fp8>")),))
PLAN = plan_from(SHAPE, measurement_at(SHAPE, 11))
MEASURED = replace(measurement_at(SHAPE, 3), gradient_noise=1.5, watched=())


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
        Notice("guard", "why"),
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
            "snip/divergence/loss_total": math.fsum(d.loss_divergence for d in lowest),
            "snip/divergence/weight_total": math.fsum(d.weight_divergence for d in lowest),
            "snip/health/gradient_noise/median": 0.065,
            "snip/health/gradient_noise/worst": 0.12,
            "snip/health/gradient_noise/plan": 1.5,
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


def test_watched_linears_have_series_of_their_names_whatever_a_refresh_finds() -> None:
    series = ScalarSeries({})
    measured = measurement_at(SHAPE, 3)
    found = series.values(Event(3, measured)) | series.values(Event(4, applied(SHAPE, PLAN)))
    lowest = dict(zip(SHAPE.names, measured.divergences.of_lowest(), strict=True))
    wanted: dict[str, float | None] = {}
    for name in measured.watched:
        wanted[f"snip/linear/{name}/quality_loss"] = lowest[name].quality_loss
        wanted[f"snip/linear/{name}/bits"] = {"fp4": 4.0, "fp8": 8.0}[str(PLAN.linears[name])]
    assert {n: v for n, v in found.items() if n.startswith("snip/linear/")} == wanted


def test_a_format_that_a_plan_stops_using_gets_the_share_zero() -> None:
    series = ScalarSeries({"formats": ["bf16", "fp8-fp4-fp4"]})
    first = series.values(Event(4, applied(SHAPE, PLAN)))
    assert first["snip/share/bf16"] == 0.0 and first["snip/share/fp4"] == PLAN.efficiency
    healed = PlanApplied(PLAN, {"bf16": 1.0}, num_changed=12)
    values = series.values(Event(8, healed))
    shares = {name: value for name, value in values.items() if name.startswith("snip/share/")}
    assert shares == {"snip/share/bf16": 1.0, "snip/share/fp8": 0.0, "snip/share/fp4": 0.0}


def test_auto_is_no_format_of_a_series() -> None:
    values = ScalarSeries({"formats": ["auto"]}).values(Event(4, applied(SHAPE, PLAN)))
    assert "snip/share/fp4" in values and "snip/share/auto" not in values


def test_unknown_values_are_left_out() -> None:
    values = {"loss": None, "a": math.nan, "b": math.inf, "c": "text", "lr": 0.5, "grad_norm": 1.0}
    found = ScalarSeries({}, left_out=["grad_norm"]).values(Event(1, Metrics(values)))
    assert set(found) == {"snip/training/lr", "snip/refresh/failed", "snip/1_guard_events"}
    blind = PLAN.model_copy(update={"objective": None, "bound": None})
    values = ScalarSeries({}).values(Event(4, applied(SHAPE, blind)))
    assert "snip/2_quality_loss_share" not in values


def test_a_linear_without_a_divergence_takes_no_series_away() -> None:
    """Frozen first layers have none."""
    known = dict(MEASURED.divergences.linears)
    none = OptionDivergence(math.nan, math.nan, None, math.nan, math.nan)
    without = dict.fromkeys(known.popitem()[1], none)
    for linears, num_known in (
        ({**known, "frozen": without}, len(known)),
        ({"frozen": without}, 0),
    ):
        divergences = replace(MEASURED.divergences, linears=linears)
        values = ScalarSeries({}).values(Event(4, replace(MEASURED, divergences=divergences)))
        total = sum(each.loss_divergence for each in divergences.of_lowest()[:num_known])
        found = [value for name, value in values.items() if name == "snip/divergence/loss_total"]
        assert found == ([pytest.approx(total)] if num_known else [])


def test_wandb_that_cannot_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "on")
    with pytest.raises(UsageError, match="WANDB_MODE is 'on'"):
        start_wandb("p", tmp_path, {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'megatron-snip\[wandb\]'"):
        start_wandb("p", tmp_path, {})


@pytest.mark.parametrize(("run_id", "resume"), [("", None), ("abc", "allow")])
def test_a_resumed_run_continues_its_wandb_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_id: str, resume: str | None
) -> None:
    started = MagicMock()
    monkeypatch.setattr("wandb.init", started)
    start_wandb("p", tmp_path, {}, run_id)
    assert started.call_args.kwargs["id"] == (run_id or None)
    assert started.call_args.kwargs["resume"] == resume


def fake_wandb(step: int = 0) -> Any:
    """W&B with a run whose rows can be read; `step` is that of the last row."""
    run = MagicMock(step=step, id="abc", rows={})
    run.settings.project_url = "https://wandb.ai/team/demo"

    def log(row: dict[str, Any], step: int) -> None:
        run.rows.setdefault(step, {}).update(row)
        run.step = step

    run.log = log
    names = {name: getattr(wandb, name) for name in ("AlertLevel", "Artifact", "Image", "Table")}
    return SimpleNamespace(run=run, config=MagicMock(), **names)


def artifacts(run: Any) -> list[Any]:
    return [call.args[0] for call in run.log_artifact.call_args_list]


def test_wandb_has_rows_plans_divergences_and_alerts() -> None:
    """Refreshes at 3 and 11, plans at 5 and 13, a reverted plan at 7."""
    module = fake_wandb()
    write_events(WandbWriter(module, {"interval": 8, "weight_lambda": 0.1}), SHAPE)
    run = module.run
    assert sorted(run.rows) == list(range(1, 17))
    for iteration, row in run.rows.items():
        assert row["snip/1_loss"] > 0
        share = 0.0 if iteration < 5 else pytest.approx(11 / 18)
        assert row["snip/3_lowest_precision_share"] == share
    loss = run.rows[13]["snip/2_quality_loss_share"]
    assert loss == pytest.approx((PLAN.objective or 0) / 1.1)
    settings = {"snip": {"interval": 8, "weight_lambda": 0.1}}
    module.config.update.assert_called_once_with(settings, allow_val_change=True)
    for name, steps in (("snip/6_plan", [5, 13]), ("snip/5_fragile_linears", [3, 11])):
        assert [step for step, row in run.rows.items() if name in row] == steps
    assert run.rows[11]["snip/5_fragile_linears"].image.width >= 1000
    assert run.rows[11]["snip/health/maps"].image.width >= 1000
    worst = ["underflow", "decoder.layers.2.mlp.linear_fc2", "input", "fp4", 0.11]
    panel = "panelDisplayName=snip%2Fhealth%2Funderflow%2Finput%2Fworst&panelSectionName=snip"
    assert [*worst, f"https://wandb.ai/team/demo?{panel}"] in run.rows[11]["snip/health/worst"].data
    assert len([name for name in run.rows[11] if "/health/" in name]) <= 14
    assert [(a.type, a.name) for a in artifacts(run)] == [("snip-plan", "plan-abc")] * 2
    (alert,) = run.alert.call_args_list
    assert alert.kwargs["title"] == "SNIP: reverted at iteration 7"
    assert alert.kwargs["text"] == "back to <fp8>"
    module.run = None  # W&B has ended the run
    WandbWriter(module, {}).write(Event(99, Metrics({"loss": 1.0})))


def test_dashboards_show_what_linears_run_under_every_plan(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    shape = replace(SHAPE, backend="te")
    module = fake_wandb()
    write_events(WandbWriter(module, {}), shape)
    updates = [call.args[0] for call in module.config.update.call_args_list]
    _, first, second = updates
    assert first["snip_precision"]["iteration"] == 5
    shown = second["snip_precision"]
    assert shown["plan_digest"] == PLAN.digest and shown["unused_rules"]
    assert sum(int(line.split()[0]) for line in shown["linears"]) == len(PLAN.linears)


def test_iterations_that_the_wandb_run_has_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget_warnings()
    module = fake_wandb(step=100)
    writer = WandbWriter(module, {})
    for iteration in (90, 91, 100, 101):
        writer.write(Event(iteration, Metrics({"loss": 1.0})))
    assert list(module.run.rows) == [100, 101]
    writer.write(Event(92, applied(SHAPE, PLAN)))
    writer.write(Event(92, Notice("guard", "the loss jumped")))
    assert list(module.run.rows) == [100, 101]
    assert len(artifacts(module.run)) == 1 and module.run.alert.call_count == 1
    assert len([r for r in caplog.records if "are left out" in r.message]) == 1


@pytest.mark.parametrize("how", [wandb.errors.CommError("no"), TimeoutError(), BrokenPipeError()])
def test_a_wandb_that_dies_is_one_line_and_costs_nothing_more(
    how: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    module = fake_wandb()
    calls: list[int] = []

    def dies(row: Any, step: int) -> None:
        calls.append(step)
        raise how

    module.run.log = dies
    reporter = Reporter([WandbWriter(module, {})])
    for iteration in range(1, 5):
        reporter.write(Event(iteration, Metrics({"loss": 1.0})))
    reporter.close()
    assert calls == [1]
    (record,) = caplog.records
    assert f"W&B has stopped ({type(how).__name__}" in record.getMessage()
    assert record.exc_info is None


def test_only_a_new_or_resumed_plan_is_drawn() -> None:
    module = fake_wandb()
    writer = WandbWriter(module, {})
    writer.write(Event(4, applied(SHAPE, PLAN, num_changed=0)))
    writer.write(Event(6, applied(SHAPE, PLAN, num_changed=0, resumed=True)))
    same, resumed = module.run.rows.values()
    assert "snip/6_plan" not in same and "snip/6_plan" in resumed
    assert [artifact.metadata["digest"] for artifact in artifacts(module.run)] == [PLAN.digest] * 2


def test_without_matplotlib_there_are_no_pictures_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(writers, "find_spec", lambda n: None if n == "matplotlib" else real(n))
    forget_warnings()
    module = fake_wandb()
    write_events(WandbWriter(module, {}), SHAPE)
    shown = {name for row in module.run.rows.values() for name in row}
    assert not shown & {"snip/5_fragile_linears", "snip/6_plan", "snip/health/maps"}
    (warning,) = [r.message for r in caplog.records if "no pictures" in r.message]
    assert "pip install 'megatron-snip[report]'" in warning


def read_tensorboard(folder: Path, **options: Any) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(folder))
    write_events(TensorBoardWriter(board, {"pins": ["a*=fp8"]}, **options), SHAPE)
    board.close()
    kinds = dict.fromkeys(("scalars", "images", "tensors"), 0)
    events = accumulators.EventAccumulator(str(folder), size_guidance=kinds)
    events.Reload()
    return events


def test_tensorboard_has_scalars_pictures_and_text(tmp_path: Path) -> None:
    events = read_tensorboard(tmp_path)

    def steps(found: Any) -> list[int]:
        return [event.step for event in found]

    def texts(name: str) -> dict[int, str]:
        found = events.Tensors(f"{name}/text_summary")
        return {e.step: e.tensor_proto.string_val[0].decode() for e in found}

    assert steps(events.Scalars("snip/1_loss")) == list(range(1, 17))
    assert steps(events.Scalars("snip/refresh/changed_linears")) == [5, 13]
    assert steps(events.Images("snip/6_plan")) == [5, 13]
    assert steps(events.Images("snip/5_fragile_linears")) == [3, 11]
    assert texts("snip/notices") == {7: "    reverted: back to <fp8>"}
    assert "    pins:\n" in texts("snip/config")[0]


def test_tensorboards_charts_show_series_of_the_run(tmp_path: Path) -> None:
    events = read_tensorboard(tmp_path)
    names = [*events.Tags()["scalars"], "lm loss", "lm loss vs samples"]
    (found,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(found.tensor_proto.string_val[0])
    (category,) = layout.category
    shown = {
        chart.title: {name for name in names for tag in chart.multiline.tag if re.match(tag, name)}
        for chart in category.chart
    }
    assert all(shown.values())
    assert shown["training loss"] == {"snip/1_loss", "lm loss"}
    assert shown["share of FLOPs by format"] == {f"snip/share/{name}" for name in ("fp4", "fp8")}


def test_under_megatron_its_interval_holds_and_its_own_metrics_are_left_out(tmp_path: Path) -> None:
    events = read_tensorboard(tmp_path, interval=5, left_out=MEGATRON_LOGS)
    shares = events.Scalars("snip/3_lowest_precision_share")
    assert [event.step for event in shares] == [5, 10, 15]
    names = set(events.Tags()["scalars"])
    assert "snip/1_loss" not in names and "snip/training/tokens_per_s" in names
    assert not names & {f"snip/training/{name}" for name in MEGATRON_LOGS}
