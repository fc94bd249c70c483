"""The frontier of a run, and why there may be none."""

from pathlib import Path

import pytest

from megatron_snip.options import Option
from megatron_snip.reporting.report.frontiers import frontier_of, quality_loss
from megatron_snip.reporting.run_record import read_run
from tests.unit.reporting.runs import Shape, config, write_run


def test_pins_and_balance_of_the_run_hold(tmp_path: Path) -> None:
    pinned = config(pins=("decoder.layers.0.*=fp8",), pipeline_balance="stage")
    found = frontier_of(read_run(write_run(tmp_path / "run", Shape(pinned, stages=1))))
    assert not isinstance(found, str)
    reached = [p for p in found.points if p.efficiency is not None]
    # A third of the work is pinned to fp8, so no plan goes beyond two thirds in fp4.
    assert max(p.efficiency or 0.0 for p in reached) == pytest.approx(2 / 3)
    assert len(reached) < len(found.points)


def test_reasons(tmp_path: Path) -> None:
    none = frontier_of(read_run(write_run(tmp_path / "off", Shape(config(enabled=False), steps=2))))
    assert none == "The run has made no refresh."


def test_a_plan_is_judged_by_the_problem(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Shape(config())))
    assert run.plan is not None and run.problem is not None
    assert quality_loss(run.problem, run.plan) == pytest.approx(run.plan.objective)
    bf16 = dict.fromkeys(run.plan.linears, Option.uniform("bf16"))
    assert quality_loss(run.problem, run.plan.model_copy(update={"linears": bf16})) == 0.0
    other = {"decoder.layers.9.mlp.linear_fc1": Option.uniform("fp4")}
    assert quality_loss(run.problem, run.plan.model_copy(update={"linears": other})) is None
