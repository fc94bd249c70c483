"""make_plan against enumeration and HiGHS, its contract, and the checker of its plans."""

import itertools

import numpy as np
import pytest

from megatron_snip.errors import PlanningError
from megatron_snip.planning import planner
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import frontier, make_plan
from megatron_snip.planning.settings import PlanSettings
from tests.processes import run_python
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of
from tests.unit.planning.instances import random_instance
from tests.unit.planning.optimality import check_against_enumeration, check_against_highs


@pytest.mark.parametrize("chunk", range(6))
def test_small_problems_are_solved_as_enumeration_solves_them(chunk: int) -> None:
    for seed in range(chunk * 100, (chunk + 1) * 100):
        check_against_enumeration(random_instance(seed))


@pytest.mark.parametrize("num_linears", [30, 90])
def test_medium_problems_are_solved_at_least_as_well_as_by_highs(num_linears: int) -> None:
    instances = (random_instance(seed, num_linears=num_linears) for seed in range(20))
    assert sum(map(check_against_highs, instances)) >= 8


@pytest.mark.parametrize("balance", ["none", "stage"])
def test_every_point_is_what_planning_for_its_target_gives(balance: str) -> None:
    random, stages = np.random.default_rng(0), [i // 5 for i in range(20)]
    losses = [[0.0, *sorted(map(float, random.random(2)))] for _ in stages]
    problem = problem_of(losses, 0.5, ("fp8", "fp4-fp8-fp8", "fp4"), stages)
    settings = PlanSettings(pipeline_balance=balance)
    points = frontier(problem, settings, [0.9, 0.1, 0.5, 0.5])
    assert list(points) == [0.1, 0.5, 0.9]
    for target, found in points.items():
        plan = make_plan(problem, settings.model_copy(update={"target": target}))
        assert found.objective == pytest.approx(plan.objective)
        assert (found.status, found.gap) == ("optimal", pytest.approx(0.0, abs=1e-9))
        assert found.efficiency >= target


def test_the_same_input_gives_the_same_plan_in_any_process() -> None:
    program = (
        "from tests.unit.planning.instances import random_instance\n"
        "from megatron_snip.planning.planner import make_plan\n"
        "i = random_instance(11, num_linears=90)\n"
        "p = make_plan(i.problem, i.settings, i.previous)\n"
        "print(p.digest, p.objective.hex(), p.bound.hex())\n"
    )
    first, second = (run_python("-c", program).stdout for _ in range(2))
    assert first == second != ""


def test_ties_do_not_change_the_plan() -> None:
    problem = problem_of([[0.0, 1.0]] * 4, target=0.5)
    for chosen in itertools.combinations(range(4), 2):
        previous = plan_of(["fp4" if i in chosen else "fp8" for i in range(4)])
        assert make_plan(problem, PlanSettings(), previous).digest == previous.digest


def test_stages_of_very_different_work_share_a_target() -> None:
    """Each stage counts in a unit of its own."""
    flops = [1e15, 1e15, 1e-4, 1e-4 / 3]
    problem = problem_of([[0.0, 1.0]] * 4, 0.5, stages=[0, 0, 1, 1], flops=flops)
    plan = make_plan(problem, PlanSettings(pipeline_balance="stage"))
    assert options_of(plan) == ["fp4", "fp8", "fp4", "fp8"]


def test_losses_too_small_to_be_scaled_count_as_equal() -> None:
    tiny = 5e-324
    losses = [[0.0, tiny], [tiny, 2 * tiny], [0.0, 3 * tiny], [0.0, tiny]]
    plan = make_plan(problem_of(losses, 0.5, flops=[tiny] * 4), PlanSettings())
    assert plan.efficiency == 0.5 and plan.objective is not None and plan.objective <= 7 * tiny


def test_the_time_limit_still_gives_a_plan() -> None:
    random = np.random.default_rng(2)
    losses = [[0.0, *(random.lognormal(0, 2, 2))] for _ in range(400)]
    stages = [i % 8 for i in range(400)]
    problem = problem_of(losses, 0.6, ("fp8", "fp4-fp8-fp8", "fp4"), stages)
    plan = make_plan(problem, PlanSettings(pipeline_balance="stage", time_limit_s=1e-3))
    assert min(plan.stages) >= 0.6
    assert plan.bound <= plan.objective


def test_an_invalid_plan_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "find_violations", lambda *_: ["something is wrong"])
    with pytest.raises(PlanningError, match="something is wrong"):
        make_plan(problem_of([[0.0, 1.0]]), PlanSettings())


def test_the_planner_needs_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, megatron_snip.planning.solver_process\n"
        "import megatron_snip.cli.plan, megatron_snip.cli.pareto\n"
        "print([m for m in ('torch', 'megatron', 'matplotlib', 'scipy') if m in sys.modules])\n"
    )
    assert run_python("-c", program).stdout == "[]\n"


CHECKED = problem_of([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, None]], stages=[0, 0, 1, 1])


def assigned(options: list[str], **changes: object) -> PrecisionPlan:
    """A plan for CHECKED whose numbers are right unless changed."""
    known = {"fp4": (1.0, 2.0, 3.0, None)}
    losses = [known.get(option, (0.0,) * 4)[i] for i, option in enumerate(options)]
    saved = [float(o == "fp4") for o in options]
    values: dict[str, object] = {
        "objective": None if None in losses else sum(losses),
        "target": 0.5,
        "efficiency": sum(saved) / 4,
        "stages": (sum(saved[:2]) / 2, sum(saved[2:]) / 2),
    }
    return plan_of(options, **(values | changes))


GOOD = ["fp4", "fp8", "fp4", "fp8"]
FIRST_STAGE = ["fp4", "fp4", "fp8", "fp8"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"objective": 5.0}, "objective 5.0, recomputed 4.0"),
        ({"objective": None}, "objective None"),
        ({"bound": 4.1}, "bound 4.1 is above"),
        ({"efficiency": 0.6}, "efficiency 0.6"),
        ({"stages": (0.5, 0.6)}, "stage 1"),
        ({"stages": (0.5,)}, "1 stages, the problem has 2"),
        ({"target": 0.4}, "target 0.4, asked for 0.5"),
        ({"digest": "0" * 64}, "digest"),
        ({"linears": {}}, "not the problem's"),
    ],
)
def test_wrong_numbers_are_found(changes: dict[str, object], fault: str) -> None:
    (found,) = find_violations(assigned(GOOD, **changes), CHECKED, PlanSettings())
    assert fault in found


@pytest.mark.parametrize(
    ("options", "settings", "faults"),
    [
        (GOOD, {}, []),
        (GOOD, {"pipeline_balance": "stage"}, []),
        (["fp4", "bf16", "fp4", "fp8"], {"pins": ((name_of(1), "bf16"),)}, []),
        (GOOD, {"pins": (("*.layers.1.*", "fp4"),)}, ["demands fp4"]),
        (["fp4", "fp8", "fp8", "fp8"], {}, ["below the target"]),
        (FIRST_STAGE, {"pipeline_balance": "stage"}, ["stage 1 is below"]),
        (["fp8", "fp8", "fp4", "fp4"], {}, ["which is forbidden"]),
        (["fp4", "fp4", "bf16", "fp8"], {}, ["no option 'bf16'"]),
        (["fp4", "fp4", "fp3", "fp8"], {}, ["no option 'fp3'"]),
    ],
)
def test_broken_constraints_are_found(
    options: list[str], settings: dict[str, object], faults: list[str]
) -> None:
    found = find_violations(assigned(options), CHECKED, PlanSettings(**settings))
    assert len(found) == len(faults) and all(map(str.__contains__, found, faults)), found


def test_policies_without_a_target_meet_the_other_constraints() -> None:
    def faults(option: str, policy: str, target: float = 0.0) -> list[str]:
        made = assigned([option] * 4, target=target)
        return find_violations(made, CHECKED, PlanSettings(policy=policy), heeds_target=False)

    assert faults("fp8", "uniform-fp8") == faults("bf16", "uniform-bf16") == []
    assert faults("fp4", "uniform-fp4") == [f"'{name_of(3)}' has 'fp4', which is forbidden"]
    assert len(faults("fp8", "uniform-fp8", target=0.5)) == 1
