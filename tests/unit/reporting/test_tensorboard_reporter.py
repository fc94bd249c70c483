"""TensorBoard's files as TensorBoard reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.reporting.reporter import Event
from megatron_snip.reporting.tensorboard_reporter import TensorBoardReporter
from tests.unit.reporting.runs import Shape, config, plan_from, refresh_at, tell

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

KINDS = ("scalars", "images", "histograms", "tensors")
SHAPE = Shape(config(), steps=16, events=(Event(7, "fallback", "back to <fp8>"),))


def read(folder: Path) -> Any:
    events = accumulators.EventAccumulator(str(folder), size_guidance=dict.fromkeys(KINDS, 0))
    events.Reload()
    return events


def texts(events: Any, name: str) -> dict[int, str]:
    found = events.Tensors(f"{name}/text_summary")
    return {e.step: e.tensor_proto.string_val[0].decode() for e in found}


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tensorboard")
    reporter = TensorBoardReporter(folder, {"lr": 0.5, "snip": {"pins": ["a*=fp8"]}})
    tell(reporter, SHAPE)
    reporter.metrics(99, {"loss": 1.0})  # after the end: must not appear
    return read(folder)


def test_every_step_has_its_scalars(events: Any) -> None:
    losses = events.Scalars("snip/training/loss")
    assert [e.step for e in losses] == list(range(16))
    changed = {e.step: e.value for e in events.Scalars("snip/planning/changed_linears")}
    assert [step for step, count in changed.items() if count] == [4, 12]


def test_pictures_histograms_and_text_stand_at_their_steps(events: Any) -> None:
    assert [e.step for e in events.Images("snip/planning/plan_map")] == [4, 12]
    assert [e.step for e in events.Images("snip/divergence/maps")] == [2, 10]
    assert [e.step for e in events.Histograms("snip/divergence/loss_log10")] == [2, 10]
    assert texts(events, "snip/controller/event") == {7: "    fallback: back to <fp8>"}
    assert "    lr: 0.5\n    snip:\n" in texts(events, "snip/config")[2]


def test_the_plan_is_a_table(events: Any) -> None:
    tables = texts(events, "snip/planning/plan")
    plan = plan_from(SHAPE, refresh_at(SHAPE, 10))
    head, line, *rows = tables[12].splitlines()
    assert head == "| linear | fprop | dgrad | wgrad |" and set(line) <= set("|- ")
    assert rows == [f"| {name} | {' | '.join(o.formats)} |" for name, o in plan.linears.items()]


def test_a_resumed_run_replaces_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    tell(TensorBoardReporter(tmp_path, {}), SHAPE)
    again = TensorBoardReporter(tmp_path, {}, first_step=9)
    again.metrics(9, {"loss": 7.0})
    again.close()
    losses = {e.step: e.value for e in read(tmp_path).Scalars("snip/training/loss")}
    assert sorted(losses) == list(range(10)) and losses[9] == 7.0


def test_without_the_package_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'megatron-snip\[tensorboard\]'"):
        TensorBoardReporter(tmp_path, {})
