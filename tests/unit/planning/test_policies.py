"""All policies meet the same constraints; none has a lower quality loss than snip."""

import contextlib
import itertools

import numpy as np
import pytest

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.options import enumerate_options
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import POLICIES, get_policy, policy_names
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import (
    MODULES,
    constraints_of,
    name_of,
    options_of,
    problem_of,
)
from tests.unit.planning.instances import random_instance

LINEARS = ("random", "min-abs-err", "min-rel-err", "norms", "layer-type", "layer-id", "last-blocks")
"""They lower one linear after the other."""
WITH_TARGET = ("snip", *LINEARS)
GEMMS = ("random-gemm", "grads-first")
SCORES = ("abs_error", "rel_error", "norms")
NUM = 24
FLOPS = [3.0, 1.0, 8.0, 4.0] * 6


def with_scores(problem: PlanningProblem) -> PlanningProblem:
    random = np.random.default_rng(9)
    linears = []
    for linear in problem.linears:
        options = {
            name: cost.model_copy(update={"scores": {s: random.random() for s in SCORES}})
            for name, cost in linear.options.items()
        }
        linears.append(linear.model_copy(update={"options": options}))
    return problem.model_copy(update={"linears": tuple(linears)})


def model(target: float = 0.6, seed: int = 0) -> PlanningProblem:
    random = np.random.default_rng(seed)
    losses = [[0.0, float(x)] for x in random.lognormal(0, 1, NUM)]
    stages = [i // 8 for i in range(NUM)]
    return with_scores(problem_of(losses, target, flops=FLOPS, stages=stages))


def named(layers: int) -> PlanningProblem:
    options = {
        "fp8": OptionCost(quality_loss=0.0, saving=0.0),
        "fp4": OptionCost(quality_loss=1.0, saving=1.0),
    }
    linears = tuple(
        LinearChoices(name=name_of(layer, kind), stage=0, flops=1.0, options=options)
        for layer in range(layers)
        for kind in MODULES
    )
    return PlanningProblem(linears=linears, target=0.5)


def plan(policy: str, problem: PlanningProblem, **settings: object) -> PrecisionPlan:
    return make_plan(problem, PlanSettings(policy=policy, **settings))


def lowered(policy: str, problem: PlanningProblem, target: float) -> list[str]:
    made = plan(policy, problem, target=target)
    return [name for name, option in made.linears.items() if str(option) == "fp4"]


def test_policies_are_found_by_name_and_state_what_they_are() -> None:
    assert set(policy_names()) == {*WITH_TARGET, *GEMMS, "uniform-OPTION"}
    static = {"random", "layer-type", "layer-id", "last-blocks", *GEMMS}
    assert {name for name, p in POLICIES.items() if not p.needs_statistics} == static
    assert {name for name, p in POLICIES.items() if p.granularity == "gemm"} == set(GEMMS)
    uniform = get_policy("uniform-fp8")
    assert (uniform.needs_statistics, uniform.heeds_target) == (False, False)
    for name in ("", "snap", "uniform-", "uniform", "greedy", "none"):
        with pytest.raises(UsageError, match="known: snip"):
            get_policy(name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["snip", *LINEARS, *GEMMS])
def test_with_options_per_gemm_all_shares_are_equal_to_within_one_gemm(
    policy: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    linears = []
    for layer, kind in itertools.product(range(6), MODULES):
        flops, loss = float(random.integers(1, 9)), random.random()
        options = {}
        for option in enumerate_options(("bf16", "fp8", "fp4"), "gemm"):
            share, scores = option.share_in("fp4"), {"abs_error": loss, "rel_error": loss}
            options[str(option)] = OptionCost(
                quality_loss=share * loss, saving=share, scores={**scores, "norms": share * loss}
            )
        name = name_of(layer, kind)
        linears.append(LinearChoices(name=name, stage=layer // 3, flops=flops, options=options))
    problem = PlanningProblem(linears=tuple(linears), target=float(random.random()))
    total, largest = sum(row.flops for row in linears), max(row.flops for row in linears) / 3
    made = plan(policy, problem, seed=seed, pins=(("*.layers.2.*", "fp8"),), target=0.4)
    assert 0.4 <= made.efficiency < 0.4 + largest / total
    made = plan(policy, problem, seed=seed)
    assert problem.target <= made.efficiency < problem.target + largest / total


def test_rules_of_practice() -> None:
    def high(layers: int, target: float) -> set[int]:
        low = lowered("last-blocks", named(layers), target)
        return {int(n.split(".")[2]) for n in named(layers).names if n not in low}

    assert high(62, 52 / 62) == {0, 1, *range(54, 62)}  # NVIDIA's 12B model
    assert high(6, 4 / 6) == {0, 5}
    with pytest.raises(UsageError, match="orders GEMMs"):
        plan("grads-first", named(3))
    options = {str(o): OptionCost(quality_loss=0.0, saving=o.share_in("fp4"))
               for o in enumerate_options(("fp8", "fp4"), "gemm")}  # fmt: skip
    linears = [row.model_copy(update={"options": options}) for row in named(6).linears]
    made = plan("grads-first", PlanningProblem(linears=tuple(linears), target=7 / 9))
    assert {o.formats[1:] for o in made.linears.values()} == {("fp4", "fp4")}
    fprop = {int(n.split(".")[2]) for n, o in made.linears.items() if o.fprop == "fp4"}
    assert fprop == {2, 3}


@pytest.mark.parametrize("policy", LINEARS)
def test_no_linear_is_lowered_without_need(policy: str) -> None:
    plans = 0
    for seed in range(100):
        instance = random_instance(seed, num_linears=None if seed % 3 else 5 + seed % 30)
        problem = with_scores(instance.problem)
        chosen = instance.settings.model_copy(
            update={"policy": policy, "target": problem.target, "change_penalty": 0.0}
        )
        with contextlib.suppress(InfeasiblePlanError):
            made = make_plan(problem, chosen)
            task = constraints_of(problem, **chosen.model_dump()).checked_task()
            table, gains = task.table, task.table.overall_row.coefficients
            columns = table.columns_of(options_of(made))
            needed: dict[int, list[bool]] = {}
            for row, column in enumerate(columns):
                allowed = np.flatnonzero(task.allowed[row])
                least = allowed[gains[row, allowed].argmin()]
                if gains[row, column] > gains[row, least]:
                    other = np.where(table.rows == row, least, columns)
                    group = int(table.stage[row]) if chosen.pipeline_balance == "stage" else 0
                    needed.setdefault(group, []).append(not task.holds(other))
            assert all(any(group) for group in needed.values()), seed
            plans += 1
    assert plans > 40


@pytest.mark.parametrize("policy", WITH_TARGET)
@pytest.mark.parametrize("balance", ["none", "stage", "bottleneck"])
def test_every_constraint_holds(policy: str, balance: str) -> None:
    pins = (("*.layers.3.*", "bf16"), ("*.layers.20.*", "fp4"))
    settings = PlanSettings(policy=policy, pipeline_balance=balance, pins=pins)
    assert find_violations(make_plan(model(), settings), model(), settings) == []
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(policy, model(0.9), pins=(("*.layers.2?.*", "fp8"),))
    assert caught.value.best_target == pytest.approx(sum(FLOPS[:20]) / sum(FLOPS))


def test_no_policy_beats_snip() -> None:
    for seed, balance in itertools.product(range(3), ("none", "stage")):
        problem = model(0.6, seed)
        losses = {p: plan(p, problem, pipeline_balance=balance).objective for p in WITH_TARGET}
        assert losses["snip"] == min(losses.values()) < losses["random"]


def test_layer_policies_protect_fc2_and_the_outer_layers() -> None:
    problem = named(3)
    assert lowered("layer-type", problem, 3 / 12) == [name_of(i, MODULES[2]) for i in range(3)]
    protected = set(problem.names) - set(lowered("layer-type", problem, 9 / 12))
    assert protected == {name_of(i, MODULES[3]) for i in range(3)}
    names = lowered("layer-id", named(12), 0.5)
    assert {int(name.split(".")[2]) for name in names} == {3, 4, 5, 6, 7, 8}
    rows = [row.model_copy(update={"name": f"n{i}"}) for i, row in enumerate(named(1).linears)]
    without = problem.model_copy(update={"linears": tuple(rows)})
    assert lowered("layer-id", without, 0.5) == ["n1", "n2"]  # position instead of layer


@pytest.mark.parametrize(
    ("policy", "score"), [("min-abs-err", "abs_error"), ("min-rel-err", "rel_error")]
)
def test_local_errors_are_lowered_smallest_first_and_unknown_ones_last(
    policy: str, score: str
) -> None:
    scores = [{score: error} for error in (0.3, None, 0.1, None)]
    problem = problem_of([[0.0, 1.0]] * 4, scores=scores)
    assert lowered(policy, problem, 0.25) == [name_of(2)]
    assert lowered(policy, problem, 0.5) == [name_of(0), name_of(2)]
    assert lowered(policy, problem, 0.75) == [name_of(0), name_of(1), name_of(2)]
    with pytest.raises(UsageError, match=f"needs the score '{score}'"):
        plan(policy, problem_of([[0.0, 1.0]] * 2))


PROBLEM = problem_of([[0.5, 1.0], [0.25, None]], target=0.75)


def test_uniform_policies_ignore_the_target_and_respect_pins() -> None:
    made = plan("uniform-fp4", problem_of([[0.5, 1.0], [0.25, 2.0]], 0.75))
    assert options_of(made) == ["fp4", "fp4"]
    assert (made.status, made.target, made.objective, made.bound) == ("fixed", 0.0, 3.0, 3.0)
    assert options_of(plan("uniform-bf16", PROBLEM)) == ["bf16", "bf16"]
    pinned = plan("uniform-fp4", PROBLEM, pins=((name_of(1), "fp8"),))
    assert options_of(pinned) == ["fp4", "fp8"]
    with pytest.raises(InfeasiblePlanError) as caught:
        plan("uniform-fp4", PROBLEM)
    assert caught.value.conflicts == ("policy uniform-fp4", "forbidden options")
    assert f"no option is left for {name_of(1)}" in str(caught.value)
    with pytest.raises(UsageError, match="fp3"):
        plan("uniform-fp3", PROBLEM)
