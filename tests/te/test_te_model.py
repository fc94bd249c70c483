"""Whole models under `--snip-backend`: which linears, which options, which plans."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_snip.reporting.reporter import FileReporter

from megatron_snip.config import Backend, SnipConfig
from megatron_snip.controller import SnipController
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.formats import lowest_precision
from megatron_snip.linears import te_support
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import Option
from megatron_snip.planning.plan import assigned_plan, write_plan
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.topology import Topology
from tests.te.models import EXPERTS, build, by_name, losses, plan

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Warnings, as they come."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logger = logging.getLogger("megatron_snip")
    logger.addHandler(listener)
    yield texts
    logger.removeHandler(listener)


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


def controller(model: Any, reporter: Any = None, **settings: Any) -> SnipController:
    """One that never measures: it needs no optimizer and no solver."""
    values = {"freeze_plan": True, "start_step": 1000, **settings}
    return SnipController(SnipConfig(**values), [model], None, reporter, topology=Topology())


def plan_file(tmp_path: Path, model: Any, option: str) -> Path:
    under = PlannedModel([model], Topology(), seed=0)
    work = {i.name: (i.stage, i.flops_per_token) for i in under.all_linears}
    path = tmp_path / "plan.json"
    write_plan(assigned_plan(plan(under, lambda _: option), work, "fp4", "snip"), path)
    return path


@pytest.mark.parametrize("backend", ["simulate", "native"])
def test_transformer_engines_linears_have_one_backend(backend: Backend) -> None:
    with pytest.raises(UnsupportedError, match=f"--snip-backend {backend}"):
        PlannedModel([build()], Topology(), 0, backend)
    for fitting in ("auto", "te"):
        assert len(PlannedModel([build()], Topology(), 0, fitting).linears) == 8  # type: ignore[arg-type]


def test_megatrons_own_linears_are_not_run_by_transformer_engine() -> None:
    with pytest.raises(UnsupportedError, match="use --transformer-impl transformer_engine"):
        PlannedModel([build(te=False)], Topology(), 0, "te")
    under = PlannedModel([build(te=False)], Topology(), 0, "auto")
    assert {linear.backend for linear in under.linears} == {"simulate"}


def test_what_runs_as_something_else_is_said() -> None:
    under = PlannedModel([build()], Topology(), 0)
    formats = ("bf16", "mxfp8", "fp8", "fp4", "nvfp4")
    lines = under.approximations([Option.uniform(name) for name in formats])
    assert [line.split(" under Transformer Engine: ")[0] for line in lines] == [
        "fp8 runs as mxfp8",
        "fp4 runs as nvfp4",
        "nvfp4 differs",
    ]
    local = PlannedModel([build(te=False)], Topology(), 0)
    assert local.approximations([Option.uniform("fp4")]) == []


def test_a_lowest_precision_that_the_machine_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, HOPPER)
    with pytest.raises(UnsupportedError, match=r"no linear of this model can run fp4.*9\.0"):
        controller(build(), formats=("fp8", "fp4"))
    assert controller(build(), formats=("bf16", "fp8"))._available.options == (
        Option.uniform("bf16"),
        Option.uniform("fp8"),
    )


def test_another_format_of_as_few_bits_stands_in_for_one_that_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quality losses are relative to a format that is measured."""
    run = controller(build(), formats=("mxfp8", "mxfp4", "nvfp4"))
    assert run.config.lowest_format == "mxfp4"
    assert lowest_precision(run._available_formats()).name == "nvfp4"
    on(monkeypatch, HOPPER)
    run = controller(build(), formats=("bf16", "mxfp8", "fp8_pow2"))
    assert lowest_precision(run._available_formats()).name == "fp8_pow2"


def test_options_by_gemm_are_offered_where_they_run(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    settings = {"formats": ("mxfp8", "nvfp4"), "granularity": "gemm"}
    assert len(controller(build(), **settings)._available.options) == 8
    assert logged == []
    monkeypatch.setattr(te_support, "has_per_gemm", lambda: False)
    options = controller(build(), **settings)._available.options
    assert options == (Option.uniform("mxfp8"), Option.uniform("nvfp4"))
    assert len(logged) == 6
    assert all("2.20.2 has no quantizers by GEMM" in text for text in logged)


def test_a_plan_from_elsewhere_is_mapped_and_the_change_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: list[str]
) -> None:
    on(monkeypatch, HOPPER)
    model = build()
    path = plan_file(tmp_path, model, "fp4")
    run = controller(model, plan_file=path, formats=("bf16", "fp8"))
    assert set(run.plan.linears.values()) == {Option.uniform("fp8")}
    (text,) = logged
    assert "fp8 in place of fp4 for 8 linears" in text and "NVFP4 GEMMs need 10.0" in text
    losses(model)
    assert {w for m in by_name(run.model).values() for w in m.seen} == {("blockwise",) * 3}
    run.close()


def test_a_plan_that_runs_is_kept_as_it_is(tmp_path: Path, logged: list[str]) -> None:
    model = build()
    path = plan_file(tmp_path, model, "fp4")
    run = controller(model, plan_file=path, formats=("fp8", "fp4"))
    assert set(run.plan.linears.values()) == {Option.uniform("fp4")}
    assert logged == []
    losses(model)
    assert {w for m in by_name(run.model).values() for w in m.seen} == {("nvfp4",) * 3}
    run.close()
    losses(model)
    assert all(m.seen[-1] == ("bf16",) * 3 for m in by_name(run.model).values())


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_stay_bf16_unless_the_run_pads_their_tokens(
    grouped: bool, tmp_path: Path, logged: list[str]
) -> None:
    """Megatron pads an expert's tokens only where the whole run quantizes."""
    model = build(grouped=grouped, **EXPERTS)
    path = plan_file(tmp_path, model, "nvfp4")
    run = controller(model, plan_file=path, formats=("mxfp8", "nvfp4"))
    experts = {n for n in run.plan.linears if ".experts." in n}
    assert len(experts) == 4
    assert {run.plan.linears[n] for n in experts} == {Option.uniform("bf16")}
    assert {run.plan.linears[n] for n in set(run.plan.linears) - experts} == {
        Option.uniform("nvfp4")
    }
    assert any("nvfp4 is not offered to 4 linears" in text for text in logged)
    assert any("bf16 in place of nvfp4 for 4 linears" in text for text in logged)
    assert all("--fp8-format or --fp4-format" in text for text in logged)
    losses(model)
    for name, module in by_name(run.model).items():
        assert set(module.seen) == {("bf16" if ".experts." in name else "nvfp4",) * 3}, name
    run.close()
    with pytest.raises(UsageError, match=r"nvfp4 is not among the options of .*experts"):
        controller(model, formats=("mxfp8", "nvfp4"), initial_option="nvfp4")


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_of_a_padded_run_take_part(grouped: bool, logged: list[str]) -> None:
    model = build(grouped=grouped, fp8="e4m3", fp8_recipe="mxfp8", **EXPERTS)
    run = controller(model, formats=("bf16", "mxfp8"), initial_option="mxfp8")
    assert set(run.plan.linears.values()) == {Option.uniform("mxfp8")}
    losses(model)
    for name, module in by_name(run.model).items():
        assert set(module.seen) == {("mxfp8",) * 3}, name
    assert logged == []
    run.close()


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_of_a_layer_are_one_row(grouped: bool) -> None:
    run = controller(build(grouped=grouped, **EXPERTS), formats=("mxfp8", "nvfp4"))
    names = list(run.plan.linears)
    assert len(names) == 8 and len(run.model.linears) == 4 + 4 * 4
    fc1 = [name for name in names if name.endswith("mlp.experts.linear_fc1")]
    assert fc1 == [f"decoder.layers.{i}.mlp.experts.linear_fc1" for i in range(2)]


def test_the_precision_log_says_what_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    path = plan_file(tmp_path, model, "fp4-fp8-bf16")
    reporter = FileReporter(RunDirectory(tmp_path / "run"))
    settings = {"formats": ("bf16", "fp8", "fp4"), "granularity": "gemm", "plan_file": path}
    with caplog.at_level(logging.INFO):
        controller(model, reporter, precision_log=True, **settings).close()
    table = json.loads((tmp_path / "run" / "precision" / "0.json").read_text())
    assert len(table["linears"]) == 8
    for row in table["linears"]:
        assert row["option"] == "fp4-fp8-bf16"
        assert row["recipe"] == "custom(nvfp4, mxfp8, bf16)"
        assert (row["backend"], row["weight_storage"]) == ("te", "float32")
    (text,) = [r.getMessage() for r in caplog.records if "precision from" in r.getMessage()]
    assert text.count("custom(nvfp4, mxfp8, bf16)") == 8
    caplog.clear()
    with caplog.at_level(logging.INFO):
        controller(model, reporter, **settings).close()
    assert not any("precision from" in r.getMessage() for r in caplog.records)


def test_a_plan_from_elsewhere_that_runs_as_something_else_warns(
    tmp_path: Path, logged: list[str]
) -> None:
    """Its format is not on offer, so nothing was said of it at the start."""
    model = build()
    path = plan_file(tmp_path, model, "fp8")
    run = controller(model, formats=("mxfp8", "nvfp4"), plan_file=path)
    assert set(map(str, run.plan.linears.values())) == {"fp8"}
    (text,) = [text for text in logged if "fp8 runs as mxfp8" in text]
    assert "plan of step" in text


def test_the_precision_log_tells_of_a_fallback(tmp_path: Path) -> None:
    reporter = FileReporter(RunDirectory(tmp_path))
    run = controller(
        build(), reporter, precision_log=True, formats=("mxfp8", "nvfp4"), freeze_plan=False
    )
    work = {i.name: (i.stage, i.flops_per_token) for i in run.model.all_linears}
    before = run.plan
    run._apply(assigned_plan(plan(run.model, lambda _: "nvfp4"), work, "nvfp4", "snip"), 5, 0.0)
    assert run._guard is not None
    run.model.apply(before.linears)  # as the guard does before it looks at the step
    run._fall_back(7, before, run._guard)
    run.close()
    files = sorted(path.name for path in (tmp_path / "precision").iterdir())
    assert files == ["0.json", "5.json", "7.json"]
    options = [
        {row["option"] for row in json.loads((tmp_path / "precision" / f).read_text())["linears"]}
        for f in files
    ]
    assert options[0] == options[2] != options[1] == {"nvfp4"}


def test_a_plan_that_changes_nothing_is_not_logged(tmp_path: Path) -> None:
    reporter = FileReporter(RunDirectory(tmp_path))
    run = controller(build(), reporter, precision_log=True, formats=("mxfp8", "nvfp4"))
    work = {i.name: (i.stage, i.flops_per_token) for i in run.model.all_linears}
    options = plan(run.model, lambda name: "mxfp8" if ".layers.0." in name else "nvfp4")
    for step in (5, 9):  # the second time there is nothing to change
        run._apply(assigned_plan(options, work, "nvfp4", "snip"), step, 0.0)
    run.close()
    assert sorted(path.name for path in (tmp_path / "precision").iterdir()) == ["0.json", "5.json"]
    table = json.loads((tmp_path / "precision" / "5.json").read_text())
    assert {row["name"]: row["recipe"] for row in table["linears"]} == {
        name: str(option) for name, option in options.items()
    }
