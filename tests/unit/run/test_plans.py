"""The first plan of a run, and plans and problems changed to what the linears can run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option
from megatron_snip.planning.plan import PrecisionPlan, write_plan
from megatron_snip.planning.restrictions import nearest_option, restrict_problem
from megatron_snip.run.plans import RunPlans, recipe_changes
from megatron_snip.run.state import ControllerState, reported_settings
from megatron_snip.topology import LinearInfo, Topology
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

FP8, FP4, NVFP4, MXFP8 = map(Option.uniform, ("fp8", "fp4", "nvfp4", "mxfp8"))
A, B, C = map(name_of, range(3))
PROBLEM = problem_of([[0.0, 0.0]] * 3, 0.5, stages=[0, 1, 1], flops=[1.0, 1.0, 2.0])
WORK = {A: (0, 1.0), B: (1, 1.0), C: (1, 2.0)}


def run_plans(
    refusals: dict[Option, dict[str, str]] | None = None,
    job: dict[str, Option] | None = None,
    pinned: dict[str, str] | None = None,
    ties: tuple[tuple[str, ...], ...] = (),
    **config: Any,
) -> RunPlans:
    """The plans of a run of one rank, whose linears refuse options as given."""
    refused = refusals or {}

    def linear(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, refusal=lambda o: refused.get(o, {}).get(name))

    infos = [LinearInfo(name, stage, 1, 1, flops) for name, (stage, flops) in WORK.items()]
    model: Any = SimpleNamespace(
        all_linears=infos,
        linears=[linear(name) for name in WORK],
        runtime=SimpleNamespace(topology=Topology()),
        backend="simulate",
        job_options=lambda: {name: (job or {}).get(name, BF16) for name in WORK},
        pinned=lambda: pinned or {},
        ties=lambda: ties,
    )
    return RunPlans(SnipConfig(**{"formats": "fp8,fp4", **config}), model, None, None)


def state_of(resumed: PrecisionPlan, **former: Any) -> ControllerState:
    settings = reported_settings(SnipConfig(**{"formats": "fp8,fp4", **former}), "simulate", {})
    return ControllerState(6, resumed, settings=settings)


def first(resumed: ControllerState | None = None, **config: Any) -> list[str]:
    return options_of(run_plans(**config).first_plan(resumed, 0).plan)


def test_the_first_plan_is_file_then_policy_then_resumed_plan_then_bf16(tmp_path: Path) -> None:
    file, plan = {"plan_file": tmp_path / "plan.json"}, plan_of(["fp8", "fp4", "fp4"])
    write_plan(plan_of(["fp4", "fp8", "fp8"]), file["plan_file"])
    assert first() == ["bf16"] * 3 == first(collect_only=True, policy="uniform-fp4")
    assert first(state_of(plan)) == ["fp8", "fp4", "fp4"]
    assert first(**file) == ["fp4", "fp8", "fp8"]
    assert first(state_of(plan, **file), **file) == ["fp8", "fp4", "fp4"]
    assert first(state_of(plan), **file) == ["fp4", "fp8", "fp8"]
    assert first(state_of(plan, **file), **file, collect_only=True) == ["fp4", "fp8", "fp8"]
    assert first(state_of(plan), policy="uniform-fp4") == ["fp4"] * 3
    assert first(state_of(plan), collect_only=True) == ["bf16"] * 3


def test_a_schedule_resumes_the_plan_of_a_policy_that_does_not_measure() -> None:
    plan, schedule = plan_of(["fp8", "fp4", "fp4"]), {"target_schedule": "0:0.75,5:0.5"}
    scheduled = {"policy": "random", **schedule}
    assert first(state_of(plan, **scheduled), **scheduled) == ["fp8", "fp4", "fp4"]
    other = {"policy": "last-blocks", **schedule}
    assert first(state_of(plan, **scheduled), **other) != ["fp8", "fp4", "fp4"]


def test_what_continues_and_what_is_planned_anew_after_a_resume() -> None:
    plan = plan_of(["fp8", "fp4", "fp4"])
    same = run_plans().first_plan(state_of(plan), 0)
    assert (same.continues, same.replans, same.changes) == (True, False, ())
    new = run_plans(efficiency_target=0.25).first_plan(state_of(plan), 0)
    assert (new.continues, new.replans, new.plan) == (False, True, plan)
    pins = run_plans(pins="*.layers.2.*=fp8", efficiency_target=0.25)
    pinned = pins.first_plan(state_of(plan, efficiency_target=0.25), 0)
    assert options_of(pinned.plan) == ["fp8", "fp4", "fp8"]
    assert pinned.plan.iteration == 6  # not that of a plan that has a file already
    assert pinned.changes == ("1 of 3 linears set to fp8: --snip-pins",)
    formats = run_plans(formats="bf16,fp8").first_plan(state_of(plan), 0)
    assert formats.changes == ("2 of 3 linears raised to fp8: --snip-formats",)


def test_without_a_measurement_only_the_quality_loss_of_bf16_is_known() -> None:
    for policy, objective in (("snip", 0.0), ("layer-id", None), ("uniform-fp8", None)):
        plan = run_plans(policy=policy).first_plan(None, 0).plan
        assert (plan.objective, plan.bound) == (objective, objective)


@pytest.mark.parametrize(
    ("formats", "target"),
    [
        ("fp8,fp8-forward-fp4-backward", 0.5),
        ("fp8,fp4-forward-mxfp8-backward", 0.25),
        ("bf16,fp8-bf16-bf16", 0.25),
        ("fp8,fp4", 0.75),
    ],
)
def test_the_default_target_is_a_share_of_what_the_options_can_lower(
    formats: str, target: float
) -> None:
    plans = run_plans(formats=formats)
    assert plans.config.efficiency_target == target
    assert plans.first_plan(None, 0).plan is not None
    text = f"the efficiency target is {target:g}, 0.75 of the "
    assert sum(text in line for line in plans.available.warnings) == (target < 0.75)
    if target < 0.75:  # a target of the user's is not changed
        with pytest.raises(UsageError, match="best reachable target"):
            run_plans(formats=formats, efficiency_target=0.75).first_plan(None, 0)


def test_constraints_that_cannot_be_met_fail_at_the_start() -> None:
    with pytest.raises(UsageError, match=r"pin \*=fp8"):
        first(pins=("*=fp8",))
    first(pins=("*=fp8",), collect_only=True)  # no plan will be made
    with pytest.raises(UsageError, match="unknown policy"):
        first(state_of(plan_of(["fp8"] * 3)), policy="best")
    with pytest.raises(UsageError, match="does not fit"):
        first(state_of(plan_of(["fp8"] * 4)))


def test_plans_of_other_machines_lose_no_precision() -> None:
    plan = plan_of(["fp4", "fp4", "fp4"], policy="snip", iteration=7)
    refusals = {FP4: {A: "no", C: "no"}, FP8: {C: "not either"}}
    settings = {"formats": "bf16,fp8,fp4", "efficiency_target": 0.25}
    found = run_plans(refusals, **settings).first_plan(state_of(plan, **settings), 0)
    adapted = found.plan
    assert options_of(adapted) == ["fp8", "fp4", "bf16"]
    assert (adapted.policy, adapted.iteration, adapted.status) == ("snip", 6, "fixed")
    assert (adapted.efficiency, adapted.stages) == (0.25, (0.0, 1 / 3))
    assert found.changes == (
        "1 of 3 linears run fp8 instead of fp4: no",
        "1 of 3 linears run bf16 instead of fp4: no",
    )
    assert run_plans({FP8: {C: "no"}}).fitted(plan) == (plan, [])


def test_the_nearest_option_has_the_fewest_bits_with_enough_in_every_gemm() -> None:
    mixed, forward = Option.parse("fp4-fp8-bf16"), Option.parse("fp8-fp4-fp4")
    for option, candidates, wanted in (
        (FP4, (NVFP4, FP4), FP4),
        (FP4, (NVFP4, MXFP8), NVFP4),
        (MXFP8, (FP8, BF16), FP8),
        (FP4, (BF16, mixed, FP8), FP8),  # 24 bits, `mixed` has 28
        (mixed, (FP8,), BF16),
        (forward, (FP4, mixed, FP8), FP8),
        (FP4, (FP8, forward), forward),
        (FP8, (), BF16),
    ):
        assert nearest_option(option, candidates) == wanted


def test_the_guards_last_resort_leaves_pinned_linears() -> None:
    plans = run_plans(pins=("*.layers.[12].*=fp8",), collect_only=True)
    plan = plans.fallback(plan_of(["fp4", "fp8", "fp4"]), 9)
    assert options_of(plan) == ["bf16", "fp8", "fp4"]
    assert (plan.policy, plan.iteration, plan.efficiency) == ("guard", 9, 0.5)


def test_a_restricted_problem_lists_what_each_linear_runs() -> None:
    problem = restrict_problem(PROBLEM, {FP4: {A: "no", B: "no"}, FP8: {B: "no"}})
    assert [list(row.options) for row in problem.linears] == [["fp8"], ["bf16"], ["fp8", "fp4"]]
    assert problem.linears[0].options["fp8"] == PROBLEM.linears[0].options["fp8"]
    bf16 = problem.linears[1].options["bf16"]
    assert (bf16.quality_loss, bf16.saving) == (0.0, 0.0)
    assert [row.flops for row in problem.linears] == [1.0, 1.0, 2.0]
    assert restrict_problem(PROBLEM, {}) == PROBLEM


FP8_JOB = {A: FP8, B: FP8, C: BF16}


def test_a_run_starts_with_what_the_job_runs_and_returns_to_it() -> None:
    for config in ({}, {"collect_only": True}, {"formats": "bf16,fp4"}):
        plans = run_plans(job=FP8_JOB, **config)
        start = plans.first_plan(None, 0)
        assert options_of(start.plan) == ["fp8", "fp8", "bf16"] and not start.changes
        assert options_of(plans.fallback(plan_of(["fp4"] * 3), 7)) == ["fp8", "fp8", "bf16"]
    assert first(job=FP8_JOB, pins=(f"{A}=fp4",)) == ["fp4", "fp8", "bf16"]


def test_pinned_linears_keep_the_job_s_option_and_the_target_is_what_is_left() -> None:
    refusals = {o: {B: "it is fixed"} for o in (BF16, FP4)}
    given: dict[str, Any] = {"job": FP8_JOB, "pinned": {B: "it is fixed"}}
    plans = run_plans(refusals, **given)
    assert plans.config.efficiency_target == 0.75
    problem = plans.unmeasured(0.75)
    assert [sorted(row.options) for row in problem.linears] == [
        ["fp4", "fp8"],
        ["fp8"],
        ["fp4", "fp8"],
    ]
    assert "1 linears stay as the job runs them: it is fixed" in plans.available.warnings
    assert options_of(plans.fitted(plan_of(["fp4"] * 3))[0]) == ["fp4", "fp8", "fp4"]
    refusals |= {FP4: {B: "it is fixed", C: "it is stored"}}
    plans = run_plans(refusals, **given)
    assert plans.config.efficiency_target == 0.25
    assert "the efficiency target is 0.25, the highest that" in plans.available.warnings[-1]
    assert plans.first_plan(None, 0).plan.target <= 0.25
    with pytest.raises(UsageError, match=r"best reachable target is 0\.25"):
        run_plans(refusals, efficiency_target=0.75, **given).first_plan(None, 0)


def test_tied_linears_get_one_option() -> None:
    plans = run_plans({FP4: {B: "too small"}}, ties=((B, C),))
    plan, replaced = plans.fitted(plan_of(["fp4"] * 3))
    assert options_of(plan) == ["fp4", "fp8", "fp8"]
    assert {each.reason for each in replaced} == {
        "too small",
        "its operations are fused with those of another linear",
    }
    assert plans.unmeasured(0.2).ties == ((B, C),)


def test_a_plan_file_from_another_recipe_says_what_changes(tmp_path: Path) -> None:
    """The run that made it wrote what its linears ran; other plans' files do not count."""
    plan = plan_of(["fp8", "bf16", "fp8"])
    (tmp_path / "plans").mkdir()
    (tmp_path / "precision").mkdir()
    file = tmp_path / "plans" / "200.json"
    write_plan(plan, file)
    model: Any = SimpleNamespace(
        linears=[
            SimpleNamespace(option=Option.uniform("fp8"), recipe="tensorwise_hybrid"),
            SimpleNamespace(option=Option.uniform("bf16"), recipe="bf16"),
        ]
    )
    assert recipe_changes(file, model) == []
    rows = [{"option": "fp8", "recipe": "blockwise"}, {"option": "bf16", "recipe": "bf16"}]
    for name, digest in (("1", "other"), ("202", plan.digest)):
        table = {"plan_digest": digest, "linears": rows if name == "202" else []}
        (tmp_path / "precision" / f"{name}.json").write_text(json.dumps(table))
    (tmp_path / "precision" / "0.json").write_text("{")
    (line,) = recipe_changes(file, model)
    assert line == f"fp8 was blockwise in the run of '{file}', and is tensorwise_hybrid here"


def test_a_resume_with_another_recipe_says_what_changes() -> None:
    config = SnipConfig(formats=("bf16", "fp8"))
    settings = reported_settings(config, "te", {"bf16": "bf16", "fp8": "blockwise"})
    state = ControllerState(iteration=3, plan=plan_of(["fp8"]), settings=settings)
    new = reported_settings(config, "te", {"bf16": "bf16", "fp8": "delayed_hybrid"})
    assert state.changes(new) == ["recipe of fp8 blockwise -> delayed_hybrid"]


def test_a_resume_that_only_measures_says_so() -> None:
    settings = reported_settings(SnipConfig(), "simulate", {})
    state = ControllerState(iteration=3, plan=plan_of(["fp8"]), settings=settings)
    new = reported_settings(SnipConfig(collect_only=True), "simulate", {})
    assert state.changes(new) == ["collect_only False -> True"]
