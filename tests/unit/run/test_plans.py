"""The first plan of a run, and what the guard returns to."""

from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning.plan import write_plan
from megatron_snip.run.plans import FirstPlan, PlanSource
from tests.unit.planning.build import options_of, plan_of
from tests.unit.run.build import FP8_JOB, STAGE_LAYERS, A, first, run_plans, state_of

FILE = Path("plan.json")
RANDOM: dict[str, Any] = {"policy": "random", "target_schedule": "0:0.75,5:0.5"}
"""A policy that needs no measurement, with a target schedule."""


@pytest.mark.parametrize(
    ("stopped", "given", "source", "options"),
    [
        # collect_only
        (None, {"collect_only": True, "policy": "uniform-fp4"}, PlanSource.JOB, "bf16 bf16 bf16"),
        ({}, {"collect_only": True}, PlanSource.JOB, "bf16 bf16 bf16"),
        (
            {"plan_file": FILE},
            {"plan_file": FILE, "collect_only": True},
            PlanSource.FILE,
            "fp4 fp8 fp8",
        ),
        # a plan file
        (None, {"plan_file": FILE}, PlanSource.FILE, "fp4 fp8 fp8"),
        ({}, {"plan_file": FILE}, PlanSource.FILE, "fp4 fp8 fp8"),
        ({"plan_file": FILE}, {"plan_file": FILE}, PlanSource.CHECKPOINT, "fp8 fp4 fp4"),
        ({"plan_file": FILE}, {}, PlanSource.CHECKPOINT, "fp8 fp4 fp4"),
        # a policy that needs no measurement
        (None, {"policy": "uniform-fp4"}, PlanSource.POLICY, "fp4 fp4 fp4"),
        ({}, {"policy": "uniform-fp4"}, PlanSource.POLICY, "fp4 fp4 fp4"),
        (RANDOM, RANDOM, PlanSource.CHECKPOINT, "fp8 fp4 fp4"),
        (RANDOM, {**RANDOM, "policy": "last-blocks"}, PlanSource.POLICY, "fp4 fp4 fp8"),
        # a checkpoint
        ({}, {}, PlanSource.CHECKPOINT, "fp8 fp4 fp4"),
        # otherwise
        (None, {}, PlanSource.JOB, "bf16 bf16 bf16"),
    ],
)
def test_where_the_first_plan_comes_from(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stopped: dict[str, Any] | None,
    given: dict[str, Any],
    source: PlanSource,
    options: str,
) -> None:
    """The rows are in the order of the list in run/plans.py; `stopped` is None for a new run."""
    monkeypatch.chdir(tmp_path)
    write_plan(plan_of(["fp4", "fp8", "fp8"]), FILE)
    former = plan_of(["fp8", "fp4", "fp4"])
    state = None if stopped is None else state_of(former, **stopped)
    found = run_plans(**given).first_plan(state, 0, 0 if state is None else 6)
    assert (found.source, options_of(found.plan)) == (source, options.split())


def test_weights_of_a_run_without_snip_get_the_plan_of_their_iteration() -> None:
    for num_done, target in ((0, 0.75), (3, 0.75), (4, 0.5)):  # of iterations 1, 4 and 5
        plan = run_plans(**RANDOM).first_plan(None, 0, num_done).plan
        assert (plan.target, plan.iteration) == (target, num_done)


@pytest.mark.parametrize(
    ("stopped", "collect_only", "iteration"),
    [(None, False, 0), (["fp8", "fp4", "fp4"], True, 6), (["fp4", "fp8", "fp8"], True, 3)],
)
def test_a_plan_of_another_run_is_numbered_by_this_ones_iterations(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stopped: list[str] | None,
    collect_only: bool,
    iteration: int,
) -> None:
    """Else this run's plan of iteration 300 would take its file; a known plan keeps its number."""
    monkeypatch.chdir(tmp_path)
    write_plan(plan_of(["fp4", "fp8", "fp8"], iteration=300), FILE)
    given = {"plan_file": FILE, "collect_only": collect_only}
    state = None if stopped is None else state_of(plan_of(stopped, iteration=3), **given)
    found = run_plans(**given).first_plan(state, 0, 0 if state is None else 6)
    assert (found.source, found.plan.iteration) == (PlanSource.FILE, iteration)


def test_a_plan_file_with_another_plan_than_before_is_another_plan_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    new = plan_of(["fp4", "fp8", "fp8"])
    write_plan(new, FILE)
    former = plan_of(["fp8", "fp4", "fp4"])
    for digest, source in ((former.digest, PlanSource.FILE), (new.digest, PlanSource.CHECKPOINT)):
        state = state_of(former, file_digest=digest, plan_file=FILE)
        assert run_plans(plan_file=FILE).first_plan(state, 0, 6).source is source
    moved = state_of(former, file_digest=new.digest, plan_file="former.json")
    assert run_plans(plan_file=FILE).first_plan(moved, 0, 6).source is PlanSource.CHECKPOINT
    FILE.unlink()
    with pytest.raises(UsageError, match=r"plan_file: cannot read plan file 'plan\.json'"):
        run_plans(plan_file=FILE)


def test_a_run_that_only_measured_plans_at_once_when_it_is_to_plan() -> None:
    state = state_of(plan_of(["bf16"] * 3), collect_only=True)
    assert run_plans().first_plan(state, 0, 6).is_outdated
    static = run_plans(**RANDOM).first_plan(state, 0, 6)
    assert static.source is PlanSource.POLICY


def test_a_resume_with_the_same_settings_continues_its_plan() -> None:
    facts: dict[str, Any] = {"stages": (0.0, 1.0), "stage_layers": STAGE_LAYERS}
    plan = plan_of(["fp8", "fp4", "fp4"], efficiency=0.75, **facts)
    found = run_plans().first_plan(state_of(plan), 0, 6)
    assert found == FirstPlan(plan, PlanSource.CHECKPOINT)
    assert not found.is_outdated


def test_a_resume_with_another_target_plans_anew() -> None:
    facts: dict[str, Any] = {"stages": (0.0, 1.0), "stage_layers": STAGE_LAYERS}
    plan = plan_of(["fp8", "fp4", "fp4"], efficiency=0.75, **facts)
    found = run_plans(efficiency_target=0.25).first_plan(state_of(plan), 0, 6)
    assert (found.plan, found.source) == (plan, PlanSource.CHECKPOINT)
    assert found.new_settings == {"efficiency_target"}
    assert found.is_outdated


def test_new_pins_and_formats_hold_in_the_plan_of_a_checkpoint() -> None:
    plan = plan_of(["fp8", "fp4", "fp4"])
    target = {"efficiency_target": 0.25}
    pinned = run_plans(pins="*.layers.2.*=fp8", **target).first_plan(state_of(plan, **target), 0, 6)
    assert options_of(pinned.plan) == ["fp8", "fp4", "fp8"]
    assert pinned.plan.iteration == 6  # not that of a plan that has a file already
    assert pinned.changes == ("1 of 3 linears set to fp8: --snip-pins",)
    formats = run_plans(formats="bf16,fp8").first_plan(state_of(plan), 0, 6)
    assert formats.changes == ("2 of 3 linears raised to fp8: --snip-formats",)


def test_without_a_measurement_only_the_quality_loss_of_bf16_is_known() -> None:
    for policy, objective in (("snip", 0.0), ("layer-id", None), ("uniform-fp8", None)):
        plan = run_plans(policy=policy).first_plan(None, 0).plan
        assert (plan.objective, plan.bound) == (objective, objective)


def test_a_run_starts_with_what_the_job_runs_and_returns_to_it() -> None:
    for config in ({}, {"collect_only": True}, {"formats": "bf16,fp4"}):
        plans = run_plans(job=FP8_JOB, **config)
        start = plans.first_plan(None, 0)
        assert options_of(start.plan) == ["fp8", "fp8", "bf16"] and not start.changes
        assert options_of(plans.job_fallback(plan_of(["fp4"] * 3), 7)) == ["fp8", "fp8", "bf16"]
    assert first(job=FP8_JOB, pins=(f"{A}=fp4",)) == ["fp4", "fp8", "bf16"]


def test_the_guards_last_resort_leaves_pinned_linears() -> None:
    plans = run_plans(pins=("*.layers.[12].*=fp8",), collect_only=True)
    plan = plans.job_fallback(plan_of(["fp4", "fp8", "fp4"]), 9)
    assert options_of(plan) == ["bf16", "fp8", "fp4"]
    assert (plan.policy, plan.iteration, plan.efficiency) == ("guard", 9, 0.5)
