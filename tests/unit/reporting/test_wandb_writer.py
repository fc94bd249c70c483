"""Writing into a W&B run that somebody else has started; `test_wandb_reporter.py` reads back."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.reporting.reporter import Applied
from megatron_snip.reporting.step_report import StepReport, StepReporter
from megatron_snip.reporting.wandb_writer import WandbWriter
from tests.unit.reporting.runs import Shape, config, plan_from, refresh_at


class Run:
    """As much of a W&B run as a row needs; `step` is the step of the row under way."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.id = "abc"
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.artifacts: list[Any] = []

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((step, row))
        self.step = step

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)


def test_steps_that_the_run_has_already_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(step=100)
    writer = WandbWriter(SimpleNamespace(run=run))
    with caplog.at_level(logging.WARNING):
        for index in (90, 91, 100, 101):
            writer.write(StepReport(index, {"a": 1.0}))
    assert [step for step, _ in run.rows] == [100, 101]
    assert [record.message for record in caplog.records] == [
        "the W&B run is at step 100 and training at 90: steps that it has already are left out"
    ]


def test_nothing_is_written_once_the_run_is_finished() -> None:
    module = SimpleNamespace(run=Run(step=0))
    run = module.run
    writer = WandbWriter(module)
    module.run = None  # as wandb.finish() leaves it
    writer.write(StepReport(3, {"a": 1.0}))
    assert run.rows == []


def test_a_plan_that_changes_nothing_is_kept_but_not_drawn() -> None:
    wandb = pytest.importorskip("wandb")
    shape = Shape(config())
    plan = plan_from(shape, refresh_at(shape, 2))
    run = Run(step=0)
    writer = WandbWriter(SimpleNamespace(run=run, Artifact=wandb.Artifact))
    writer.write(StepReport(4, {"a": 1.0}, applied=Applied(plan, 4, 0, 0.0)))
    assert run.rows == [(4, {"a": 1.0})]
    assert [artifact.metadata["digest"] for artifact in run.artifacts] == [plan.digest]


def test_the_plan_that_a_run_goes_on_with_is_drawn() -> None:
    wandb = pytest.importorskip("wandb")
    shape = Shape(config())
    plan = plan_from(shape, refresh_at(shape, 2))
    run = Run(step=0)
    words = {"Artifact": wandb.Artifact, "Table": wandb.Table, "Image": wandb.Image}
    reporter = StepReporter([WandbWriter(SimpleNamespace(run=run, **words))])
    reporter.planned(Applied(plan, 6, 0, 0.0, resumed=True))
    reporter.metrics(6, {"loss": 1.0})
    ((step, row),) = run.rows
    assert step == 6
    assert row["snip/planning/objective"] == plan.objective
    assert row["snip/planning/efficiency"] == plan.efficiency
    assert row["snip/planning/changed_linears"] == 0
    assert len(row["snip/planning/plan"].data) == len(plan.linears)
    assert [artifact.metadata["digest"] for artifact in run.artifacts] == [plan.digest]
