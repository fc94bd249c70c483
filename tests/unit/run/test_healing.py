"""When healing begins, and the order in which it raises GEMMs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.run.healing import (
    begins_below_noise,
    healing_problem,
    healing_targets,
    heals_in_order,
    scheduled_targets,
)
from megatron_snip.run.replanning import target_to_plan_for
from megatron_snip.run.state import RunState
from megatron_snip.target_schedule import Point, TargetSchedule
from tests.unit.planning.build import name_of, plan_of
from tests.unit.run.build import run_plans

OPTIONS = [Option.parse(text) for text in ("bf16", "fp4-bf16-bf16", "bf16-fp4-fp4", "fp4")]
COSTS = {str(o): OptionCost(quality_loss=0.0, saving=o.share_in("fp4")) for o in OPTIONS}


def config(order: str, **more: Any) -> SnipConfig:
    return SnipConfig(formats="bf16,fp4", granularity="gemm", heal_order=order, **more)


def row_of(index: int, options: dict[str, OptionCost] = COSTS) -> LinearChoices:
    return LinearChoices(name=name_of(index), stage=0, flops=1.0, options=options)


def left(
    target: float, settings: SnipConfig, efficiency: float = 1.0, fixed: Sequence[str] = ()
) -> list[list[str]]:
    """The options of two linears that healing from FP4 in all GEMMs leaves."""
    plan = plan_of(["fp4", "fp4"], efficiency=efficiency)
    problem = PlanningProblem(linears=(row_of(0), row_of(1)), target=target)
    healed = healing_problem(problem, plan, settings, fixed)
    return [list(row.options) for row in healed.linears]


@pytest.mark.parametrize(
    ("order", "target", "options"),
    [
        # dgrad and wgrad are two thirds: above that target they stay
        ("forward", 0.8, ["bf16-fp4-fp4", "fp4"]),
        ("forward", 0.5, ["bf16", "bf16-fp4-fp4"]),
        # fprop is a third
        ("backward", 0.5, ["fp4-bf16-bf16", "fp4"]),
        ("backward", 0.2, ["bf16", "fp4-bf16-bf16"]),
    ],
)
def test_the_gemms_that_come_first_are_all_raised_before_the_others(
    order: str, target: float, options: list[str]
) -> None:
    assert left(target, config(order)) == [options, options]


def test_fixed_linears_and_plans_short_of_the_target_keep_all_options() -> None:
    fixed, free = left(0.8, config("forward"), fixed=[name_of(0)])
    assert fixed == list(COSTS)
    assert free == ["bf16-fp4-fp4", "fp4"]
    assert left(0.8, config("forward"), efficiency=0.7) == [list(COSTS), list(COSTS)]


@pytest.mark.parametrize(
    ("target", "ties", "others"),
    [
        (0.7, (), {"fp4"}),
        (0.5, (), {"bf16-fp4-fp4"}),
        (0.3, (), {"bf16-fp4-fp4", "bf16"}),
        (0.4, ((0, 1),), {"bf16", "fp4", "bf16-fp4-fp4"}),
    ],
)
def test_a_linear_whose_low_options_are_forbidden_leaves_the_order_to_the_others(
    target: float, ties: tuple[tuple[int, int], ...], others: set[str]
) -> None:
    costs = {}
    forbidden = {}
    for text, cost in COSTS.items():
        costs[text] = cost.model_copy(update={"quality_loss": 3 * cost.saving})
        forbidden[text] = cost if text == "bf16" else cost.model_copy(update={"quality_loss": None})
    rows = (row_of(0, forbidden), *(row_of(i, costs) for i in range(1, 4)))
    plan = plan_of(["fp4"] * 4, efficiency=1.0)
    tied = tuple((name_of(i), name_of(j)) for i, j in ties)
    problem = PlanningProblem(linears=rows, target=target, ties=tied)
    healed = make_plan(healing_problem(problem, plan, config("forward")), PlanSettings(), plan)
    first, *rest = map(str, healed.linears.values())
    # Above a half, dgrad and wgrad of three linears do not save enough without fprop.
    assert first == "bf16" and set(rest) == others


def test_the_order_holds_from_the_iteration_on_in_which_healing_begins() -> None:
    healing = TargetSchedule((Point(0, 0.8),), heal_from=5)
    assert [heals_in_order(config("forward"), healing, i) for i in (4, 5, 6)] == [False, True, True]
    assert not heals_in_order(config("plan"), healing, 6)
    assert not heals_in_order(config("forward"), TargetSchedule((Point(0, 0.8),)), 6)


def test_healing_begins_once_where_the_noise_of_the_plan_is_above_the_limit() -> None:
    settings = SnipConfig(heal_below_noise=0.5)
    steady = TargetSchedule((Point(0, 0.8),))

    def begins(noise: float | None, targets: TargetSchedule = steady, at: int = 40) -> bool:
        return begins_below_noise(settings, targets, at, noise)

    assert [begins(noise) for noise in (None, 0.0, 0.5, 0.51)] == [False, False, False, True]
    assert not begins_below_noise(SnipConfig(), steady, 40, 9.0)
    late = healing_targets(settings, steady, 60, 100)
    assert begins(0.51, late) and not begins(0.51, late, at=60)


def test_a_run_that_heals_because_of_noise_follows_the_ramp_of_heal_from() -> None:
    """The rest of a target schedule is dropped."""
    values: dict[str, Any] = {"target_schedule": "0:0.8,70:0.4", "lag": 2}
    plans = run_plans(train_iters=100, heal_below_noise=1.0, **values)
    state = RunState(50, plan_of(["fp8", "fp8", "fp4"]), heal_from=50)
    found = plans.targets_of(state)
    assert found.heal_from == 50
    like = scheduled_targets(SnipConfig(target_schedule="0:0.8", heal_from=50, lag=2), 100)
    assert [found.at(i) for i in range(50, 101)] == [like.at(i) for i in range(50, 101)]
    assert (found.at(49), found.at(95)) == (0.8, 0.0)
    for other in (None, replace(state, heal_from=None)):
        assert plans.targets_of(other) is plans.targets
    off = run_plans(train_iters=100, **values)
    assert off.targets_of(state) is off.targets
    asked = target_to_plan_for(replace(state, target=0.8), 90, plans, lambda: True)
    assert asked == found.at(92)


def test_noise_is_refused_where_nothing_measures_it_or_the_end_is_not_known() -> None:
    with pytest.raises(UsageError, match="heal_below_noise: the policy 'last-blocks' measures no"):
        run_plans(policy="last-blocks", heal_below_noise=1.0, train_iters=100)
    with pytest.raises(UsageError, match="heal_below_noise: the number of iterations is not known"):
        run_plans(heal_below_noise=1.0)
