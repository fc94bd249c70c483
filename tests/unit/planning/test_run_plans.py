"""The first plan of a run, and plans and problems changed to what the linears can run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.options import BF16, Option
from megatron_snip.planning.plan import write_plan
from megatron_snip.planning.planner import (
    adapt_plan,
    initial_plan,
    nearest_option,
    restrict_problem,
)
from megatron_snip.run_plans import RunPlans
from megatron_snip.topology import LinearInfo, Topology
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

FP8, FP4, NVFP4, MXFP8 = map(Option.uniform, ("fp8", "fp4", "nvfp4", "mxfp8"))
A, B, C = map(name_of, range(3))
PROBLEM = problem_of([[0.0, 0.0]] * 3, 0.5, stages=[0, 1, 1], flops=[1.0, 1.0, 2.0])
WORK = {A: (0, 1.0), B: (1, 1.0), C: (1, 2.0)}


def first(**config: Any) -> list[str]:
    resumed = config.pop("resumed", None)
    return options_of(initial_plan(PROBLEM, SnipConfig(**config), 0, resumed))


def test_the_first_plan_is_file_then_resumed_plan_then_policy_then_bf16(tmp_path: Path) -> None:
    plan_file, resumed = tmp_path / "plan.json", plan_of(["fp8", "fp4", "fp4"])
    write_plan(plan_of(["fp4", "fp8", "fp8"]), plan_file)
    assert first() == ["bf16"] * 3 == first(collect_only=True, policy="uniform-fp4")
    assert first(resumed=resumed) == ["fp8", "fp4", "fp4"]
    assert first(plan_file=plan_file) == ["fp4", "fp8", "fp8"]
    assert first(plan_file=plan_file, resumed=resumed) == ["fp8", "fp4", "fp4"]
    stays = {"plan_file": plan_file, "collect_only": True}
    assert first(**stays, resumed=resumed) == ["fp4", "fp8", "fp8"]
    assert first(policy="uniform-fp4", resumed=resumed) == ["fp4"] * 3


def test_without_a_measurement_only_the_quality_loss_of_bf16_is_known() -> None:
    for policy, objective in (("snip", 0.0), ("layer-id", None), ("uniform-fp8", None)):
        plan = initial_plan(PROBLEM, SnipConfig(policy=policy))
        assert (plan.objective, plan.bound) == (objective, objective)


def test_constraints_that_cannot_be_met_fail_at_the_start() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"pin \*=fp8"):
        first(pins=("*=fp8",))
    first(pins=("*=fp8",), collect_only=True)  # no plan will be made
    with pytest.raises(UsageError, match="unknown policy"):
        first(policy="best", resumed=plan_of(["fp8"] * 3))
    with pytest.raises(UsageError, match="does not fit"):
        first(resumed=plan_of(["fp8"] * 4))


def test_plans_of_other_machines_lose_no_precision() -> None:
    plan = plan_of(["fp4", "fp4", "fp4"], policy="snip", iteration=7)
    refusals = {FP4: {A: "no", C: "no"}, FP8: {C: "not either"}, BF16: {}}
    adapted, changes = adapt_plan(plan, (BF16, FP8, FP4), refusals, WORK, "fp4")
    assert options_of(adapted) == ["fp8", "fp4", "bf16"]
    assert (adapted.policy, adapted.iteration, adapted.status) == ("snip", 7, "fixed")
    assert (adapted.efficiency, adapted.stages) == (0.25, (0.0, 1 / 3))
    assert changes == [
        "1 of 3 linears run fp8 instead of fp4: no",
        "1 of 3 linears run bf16 instead of fp4: no",
    ]
    assert adapt_plan(plan, (FP8,), {FP4: {}, FP8: {C: "no"}}, WORK, "fp4") == (plan, [])


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
    infos = [LinearInfo(name, stage, 1, 1, flops) for name, (stage, flops) in WORK.items()]
    model: Any = SimpleNamespace(
        all_linears=infos, runtime=SimpleNamespace(topology=Topology()), backend="simulate"
    )
    config = SnipConfig(pins=("*.layers.[12].*=fp8",), collect_only=True)
    plans = RunPlans(config, model, None, None)
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
