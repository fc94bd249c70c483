"""The checker finds everything that can be wrong with a plan."""

import pytest

from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import name_of, plan_of, problem_of


def problem(target: float = 0.5) -> PlanningProblem:
    return problem_of(
        [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, None]], target, stages=[0, 0, 1, 1]
    )


def plan(options: list[str], **changes: object) -> PrecisionPlan:
    """A plan for `problem` whose numbers are right unless changed."""
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
    (found,) = find_violations(plan(GOOD, **changes), problem(), PlanSettings())
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
        (FIRST_STAGE, {"pipeline_balance": "bottleneck"}, ["slowest stage takes 2"]),
        (["fp8", "fp8", "fp4", "fp4"], {}, ["which is forbidden"]),
        (["fp4", "fp4", "bf16", "fp8"], {}, ["no option 'bf16'"]),
        (["fp4", "fp4", "fp3", "fp8"], {}, ["no option 'fp3'"]),
    ],
)
def test_broken_constraints_are_found(
    options: list[str], settings: dict[str, object], faults: list[str]
) -> None:
    found = find_violations(plan(options), problem(), PlanSettings(**settings))
    assert len(found) == len(faults) and all(map(str.__contains__, found, faults)), found


def test_policies_without_a_target_meet_the_other_constraints() -> None:
    def faults(option: str, policy: str, target: float = 0.0) -> list[str]:
        made = plan([option] * 4, target=target)
        return find_violations(made, problem(), PlanSettings(policy=policy))

    assert faults("fp8", "uniform-fp8") == faults("bf16", "uniform-bf16") == []
    assert faults("fp4", "uniform-fp4") == [f"'{name_of(3)}' has 'fp4', which is forbidden"]
    assert len(faults("fp8", "uniform-fp8", target=0.5)) == 1


def test_time_is_checked_in_seconds() -> None:
    timed = problem_of([[0.0, 1.0]] * 2, target=0.5, seconds=[[4.0, 1.0], [2.0, 1.0]])
    settings = PlanSettings(cost="time")
    good = plan_of(["fp4", "fp8"], objective=1.0, target=0.5, efficiency=0.75, stages=(0.75,))
    bad = plan_of(["fp8", "fp4"], objective=1.0, target=0.5, efficiency=0.25, stages=(0.25,))
    assert find_violations(good, timed, settings) == []
    assert find_violations(bad, timed, settings) == ["efficiency 0.25 is below the target 0.5"]
