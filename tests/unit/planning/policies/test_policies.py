"""What all policies have in common: one registry, one budget arithmetic."""

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.planning.cost import COST_MODELS
from megatron_snip.planning.plan import PrecisionPlan, changed_linears
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import POLICIES, get_policy, policy_names
from megatron_snip.planning.policies.fill import gentlest
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.rules import make_rules
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.table import make_table
from megatron_snip.planning.validate import find_violations
from tests.unit.planning.build import plan_of, problem_of
from tests.unit.planning.instances import Instance, random_instance

HEEDING = ("snip", "greedy", "random", "min-abs-err", "min-rel-err", "layer-type", "layer-id")
"""The policies that reach the target."""

NUM = 24
FLOPS = [3.0, 1.0, 8.0, 4.0] * 6
STAGES = [i // 8 for i in range(NUM)]


def problem(target: float = 0.6, seed: int = 0) -> PlanningProblem:
    random = np.random.default_rng(seed)
    losses = [[0.0, float(x)] for x in random.lognormal(0, 1, NUM)]
    return problem_of(losses, target, flops=FLOPS, stages=STAGES)


def metrics(given: PlanningProblem) -> dict[str, dict[str, dict[str, float | None]]]:
    random = np.random.default_rng(9)
    return {
        linear.name: {
            option: {"abs_error": float(random.random()), "rel_error": float(random.random())}
            for option in linear.options
        }
        for linear in given.linears
    }


def plan(policy: str, given: PlanningProblem, **settings: object) -> PrecisionPlan:
    previous = settings.pop("previous", None)
    return make_plan(given, PlanSettings(policy=policy, **settings), previous, 3, metrics(given))


def test_the_registry_lists_every_policy() -> None:
    assert set(policy_names()) == {*HEEDING, "none", "uniform-OPTION"}
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert get_policy(name) is policy
    assert get_policy("uniform-fp8").name == "uniform-fp8"
    for name in ("", "snap", "uniform-", "uniform"):
        with pytest.raises(UsageError, match="known: snip"):
            get_policy(name)


@pytest.mark.parametrize("policy", HEEDING)
@pytest.mark.parametrize("target", [0.0, 0.3, 0.75, 1.0])
def test_the_target_is_overshot_by_at_most_one_linear(policy: str, target: float) -> None:
    given = problem(target)
    made = plan(policy, given)
    assert target <= made.efficiency < target + max(FLOPS) / sum(FLOPS) or target == 0.0
    assert (made.policy, made.target, made.step) == (policy, target, 3)
    assert made.bound is not None
    assert made.bound <= made.objective


@pytest.mark.parametrize("policy", HEEDING)
def test_every_stage_s_target_is_overshot_by_at_most_one_linear(policy: str) -> None:
    made = plan(policy, problem(0.6), pipeline_balance="stage")
    for efficiency in made.stages:
        assert 0.6 <= efficiency < 0.6 + max(FLOPS) / sum(FLOPS[:8])


def lowered_without_need(policy: str, instance: Instance) -> list[str]:
    """Linears that a plan lowers (beyond where the policy starts and beyond the plan before) though
    the target, overall or of their stage, needs none of them; each is put back by itself."""
    given, settings = instance.problem, instance.settings
    plan = make_plan(given, settings, instance.previous, 0, metrics(given))
    table = make_table(given, COST_MODELS[settings.cost])
    columns = table.columns_of([str(plan.linears[name]) for name in table.names])
    before = instance.previous
    hint = before and table.columns_of([str(before.linears[name]) for name in table.names])
    task = make_rules(table, settings, given.target, hint).checked_task()
    start = gentlest(task)
    superfluous: dict[int, list[str]] = {}
    for row, column in enumerate(columns.tolist()):
        back = [int(start[row])]
        if settings.max_changes is not None and hint is not None and hint[row] >= 0:
            back.append(int(hint[row]))
        back = [b for b in back if task.allowed[row, b]]
        if table.gains[row][column] <= max(table.gains[row][b] for b in back):
            continue
        group = int(table.stage[row]) if settings.pipeline_balance == "stage" else 0
        undone = [np.where(np.arange(len(columns)) == row, b, columns) for b in back]
        needed = not all(task.holds(other) for other in undone)
        superfluous.setdefault(group, []).append("" if needed else table.names[row])
    return [name for names in superfluous.values() if all(names) for name in names]


@pytest.mark.parametrize("policy", [p for p in HEEDING if p not in ("snip", "greedy")])
def test_nothing_is_lowered_without_need_whatever_the_rules(policy: str) -> None:
    plans = 0
    for seed in range(150):
        instance = random_instance(seed, num_linears=None if seed % 3 else 5 + seed % 30)
        chosen = {"policy": policy, "target": instance.problem.target}
        instance = replace(instance, settings=instance.settings.model_copy(update=chosen))
        with contextlib.suppress(InfeasiblePlanError):
            assert lowered_without_need(policy, instance) == [], seed
            plans += 1
    assert plans > 60


def feasible(given: PlanningProblem, settings: PlanSettings, before: PrecisionPlan) -> bool:
    try:
        make_plan(given, settings, before)
    except InfeasiblePlanError:
        return False
    return True


@pytest.mark.parametrize("policy", HEEDING)
@pytest.mark.parametrize("balance", ["none", "stage", "bottleneck"])
@pytest.mark.parametrize("max_changes", [None, 4, 12])
def test_all_rules_are_kept(policy: str, balance: str, max_changes: int | None) -> None:
    given = problem(0.6)
    settings = PlanSettings(
        policy=policy,
        pipeline_balance=balance,
        pins=(("*.layers.3.*", "bf16"), ("*.layers.20.*", "fp4")),
        max_changes=max_changes,
    )
    before = make_plan(given, PlanSettings(policy="random", pipeline_balance=balance, target=0.55))
    snip = settings.model_copy(update={"policy": "snip"})
    if not feasible(given, snip, before):
        with pytest.raises(InfeasiblePlanError, match="max-changes"):
            make_plan(given, settings, before, 0, metrics(given))
        return
    made = make_plan(given, settings, before, 0, metrics(given))
    assert find_violations(made, given, settings, before) == []
    if max_changes is not None:
        assert len(changed_linears(before, made)) <= max_changes


def test_nobody_beats_snip() -> None:
    for seed, balance in itertools.product(range(3), ("none", "stage")):
        given = problem(0.6, seed)
        losses = {
            policy: plan(policy, given, pipeline_balance=balance).objective for policy in HEEDING
        }
        assert min(losses, key=losses.__getitem__) in ("snip", "greedy")
        assert losses["snip"] <= min(losses.values())
        assert losses["snip"] < losses["random"]


@pytest.mark.parametrize("policy", HEEDING)
def test_what_cannot_be_reached_is_infeasible_for_everyone(policy: str) -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(policy, problem(0.9), pins=(("*.layers.2?.*", "fp8"),))
    assert caught.value.best_target == pytest.approx(sum(FLOPS[:20]) / sum(FLOPS))


@pytest.mark.parametrize("policy", [p for p in HEEDING if p != "snip"])
def test_baselines_go_towards_their_plan_as_far_as_changes_allow(policy: str) -> None:
    given = problem(0.6)
    goal = plan(policy, given)
    before = make_plan(given, PlanSettings(policy="random", seed=99))
    distance = len(changed_linears(before, goal))
    limited = plan(policy, given, previous=before, max_changes=distance // 2)
    assert 0 < len(changed_linears(before, limited)) <= distance // 2
    assert len(changed_linears(limited, goal)) < distance
    unlimited = plan(policy, given, previous=before, max_changes=distance)
    assert unlimited.digest == goal.digest


def test_the_previous_plan_of_a_gentler_model_is_lowered_first() -> None:
    given = problem(0.5)
    made = plan("layer-id", given, previous=plan_of(["fp8"] * NUM), max_changes=12)
    assert made.efficiency >= 0.5
