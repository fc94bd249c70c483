"""MLflow and Comet get what W&B gets."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from megatron_snip.reporting.background import BackgroundWriter
from megatron_snip.reporting.events import Event, Notice, Settings
from megatron_snip.reporting.scalars import MEGATRON_LOGS, ScalarSeries
from megatron_snip.reporting.trackers import CometWriter, MlflowWriter
from tests.processes import ROOT
from tests.unit.reporting.runs import Shape, config, write_events

NOTICE = Notice("reverted", "back to fp8")
SHAPE = Shape(config(weight_lambda=0.1), iterations=16, notices=((7, NOTICE),), backend="te")
"""Refreshes at 3 and 11, plans at 5 and 13."""


class Expected:
    """The scalars of a run by name and iteration."""

    def __init__(self, settings: dict[str, Any], left_out: frozenset[str]) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self._series = ScalarSeries(settings, left_out)

    def write(self, event: Event) -> None:
        for name, value in self._series.values(event).items():
            self.scalars.setdefault(name, {})[event.iteration] = value

    def close(self) -> None: ...


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The stand-ins of MLflow and Comet."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_ins" / "trackers"))
    import comet_ml
    import mlflow

    mlflow.RUNS.clear()
    yield mlflow, comet_ml
    mlflow.end_run()


def written(logger: Any, make: Any) -> dict[str, dict[int, float]]:
    """Write a run in a thread of the writer's own; return the scalars that W&B would get."""
    settings = {"interval": 8, "weight_lambda": 0.1}
    expected = Expected(settings, MEGATRON_LOGS)
    write_events(expected, SHAPE)
    with closing(BackgroundWriter(make(logger, settings, 1, MEGATRON_LOGS))) as writer:
        write_events(writer, SHAPE, close=False)
        changed = Settings({**settings, "efficiency_target": 0.5})
        writer.write(Event(17, changed))
    slow = {"snip/4_refresh_overhead_percent"}  # a time
    return {name: values for name, values in expected.scalars.items() if name not in slow}


def test_mlflow_gets_them_in_the_run_of_the_training_thread(trackers: tuple[Any, Any]) -> None:
    """Another thread has no active run: to ask MLflow for it there would start a second one."""
    mlflow, _ = trackers
    run_id = mlflow.start_run(run_name="tiny").info.run_id
    scalars = written(mlflow, MlflowWriter)
    assert list(mlflow.RUNS) == [run_id]
    run = mlflow.RUNS[run_id]
    assert {name: run["metrics"][name] for name in scalars} == scalars
    assert "snip/1_loss" not in scalars and len(scalars) > 10
    assert run["tags"]["snip.efficiency_target"] == "0.5"
    assert run["tags"]["snip.notice"] == "iteration 7: reverted: back to fp8"
    files = run["files"]
    assert files["snip/config.json"]["efficiency_target"] == 0.5
    assert {f"snip/plans/{number}.json" for number in (3, 11)} <= files.keys()
    assert files["snip/precision/13.json"]["plan_digest"] == files["snip/plans/11.json"]["digest"]
    assert {"snip/6_plan/5.png", "snip/health/maps/11.png"} <= files.keys()


def test_comet_gets_them(trackers: tuple[Any, Any]) -> None:
    _, comet = trackers
    experiment = comet.Experiment()
    scalars = written(experiment, CometWriter)
    assert {name: experiment.metrics[name] for name in scalars} == scalars
    assert experiment.parameters["snip_efficiency_target"] == 0.5
    assert experiment.texts == {7: "SNIP: reverted: back to fp8"}
    files = experiment.files
    assert files["snip/precision/13.json"]["plan_digest"] == files["snip/plans/11.json"]["digest"]
    assert {"snip/6_plan/5", "snip/health/maps/11"} <= files.keys()
