"""Which problem the solver gets, when, and for which target."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.run.plans import RunPlans
from megatron_snip.run.replanning import (
    after_failed_plan,
    target_to_plan_for,
    with_problem,
    without_problem,
)
from megatron_snip.run.schedule import ScheduleState
from megatron_snip.run.state import RunState
from tests.unit.planning.build import plan_of, problem_of
from tests.unit.run.build import run_plans

PLAN = plan_of(["fp8", "fp8", "fp4"], target=0.5)
PROBLEM = problem_of([[0.0, 1.0]] * 3)
CHANGING: dict[str, Any] = {
    "target_schedule": "0:0.5,50:0.75",
    "interval": 1000,
    "start_step": 10,
    "lag": 2,
}
STATE = RunState(47, PLAN, target=0.5, schedule=ScheduleState(refreshed=10))
"""The first refresh has ended; the plan of its target runs."""


def problem_at(target: float) -> PlanningProblem:
    return PROBLEM.model_copy(update={"target": target})


def asked(
    state: RunState,
    iteration: int,
    suffices: bool = True,
    plans: RunPlans | None = None,
    **new: Any,
) -> float | None:
    plans = plans or run_plans(**{**CHANGING, **new})
    return target_to_plan_for(state, iteration, plans, lambda: suffices)


def pending(state: RunState) -> tuple[int, int, float] | None:
    """(iteration, apply_at, target) of what the solver works on."""
    solve = state.solve
    return solve and (solve.iteration, solve.apply_at, solve.problem.target)


@pytest.mark.parametrize("policy", ["snip", "last-blocks"])
def test_a_new_target_is_planned_for_once_so_that_its_plan_is_in_time(policy: str) -> None:
    plans = run_plans(policy=policy, **CHANGING)
    assert [asked(STATE, i, plans=plans) for i in range(11, 48)] == [None] * 37
    assert asked(STATE, 48, plans=plans) == 0.75
    state = with_problem(STATE, 48, problem_at(0.75), plans)
    assert pending(state) == (48, 50, 0.75) and state.target == 0.75
    applied = replace(state, solve=None)
    assert asked(applied, 49, plans=plans) is None


def test_after_a_revert_a_new_target_whose_problem_was_dropped_is_planned_for_again() -> None:
    state = with_problem(STATE, 48, problem_at(0.75), run_plans(**CHANGING))
    dropped = without_problem(state)
    assert dropped.solve is None and dropped.target == PLAN.target
    assert asked(dropped, 49) == 0.75


def test_after_a_revert_without_a_problem_nothing_is_planned() -> None:
    state = replace(STATE, target=0.75)
    assert without_problem(state) is state
    assert asked(state, 60) is None


def test_a_target_whose_solve_failed_is_planned_for_again_after_the_interval() -> None:
    """Without measurements no refresh plans for it."""
    new = {"policy": "last-blocks"}
    state = with_problem(STATE, 48, problem_at(0.75), run_plans(**CHANGING, **new))
    failed = after_failed_plan(state, 50, 1000)
    assert failed.target == 0.5  # that of the plan that stays
    assert [asked(failed, i, **new) for i in (50, 51, 1049)] == [None] * 3
    assert asked(failed, 1050, **new) == 0.75


def test_without_measurements_a_policy_that_needs_them_plans_for_no_new_target() -> None:
    assert asked(replace(STATE, target=None), 48) is None


def test_a_new_target_waits_for_measurements_in_the_formats_of_the_run() -> None:
    assert asked(STATE, 48, suffices=False) is None
    assert asked(STATE, 48, suffices=False, policy="last-blocks") == 0.75


def test_a_new_target_waits_while_another_problem_is_solved() -> None:
    state = with_problem(STATE, 47, problem_at(0.5), run_plans(**CHANGING))
    assert asked(state, 48) is None


def test_the_problem_of_a_refresh_is_due_after_the_lag() -> None:
    state = with_problem(STATE, 20, problem_at(0.6), run_plans(lag=3))
    assert pending(state) == (20, 23, 0.6) and state.target == 0.6
    at_once = with_problem(STATE, 20, problem_at(0.6), run_plans(lag=3), apply_at=21)
    assert pending(at_once) == (20, 21, 0.6)
