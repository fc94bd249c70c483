import numpy as np
import pytest

from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies.greedy import hull_steps
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import options_of, problem_of, rules_of

OPTIONS = ("fp8", "fp4-fp8-fp8", "fp4")


def test_steps_follow_each_linear_s_lower_hull_in_order_of_slope() -> None:
    losses = [
        [0.0, 1.0, 9.0],  # slopes 3 and 12
        [0.0, 5.0, 6.0],  # the middle lies above the line: one step of slope 6
    ]
    task = rules_of(problem_of(losses, options=OPTIONS)).task()
    steps = hull_steps(task, np.array([0, 0]))
    assert [(row, column) for _, row, column in steps] == [(0, 1), (1, 2), (0, 2)]
    assert [slope for slope, _, _ in steps] == pytest.approx([1.0, 2.0, 4.0])  # units of a third


def test_the_cheapest_efficiency_comes_first() -> None:
    problem = problem_of([[0.0, 4.0], [0.0, 1.0], [0.0, 9.0]], 0.6, flops=[4.0, 2.0, 4.0])
    assert options_of(make_plan(problem, PlanSettings(policy="greedy"))) == ["fp4", "fp4", "fp8"]


def test_options_that_gain_and_lose_nothing_are_where_it_starts() -> None:
    problem = problem_of([[1.0, 0.5], [0.0, 0.0]], target=0.0)
    plan = make_plan(problem, PlanSettings(policy="greedy"))
    assert (options_of(plan), plan.objective) == (["fp4", "fp4"], 0.5)


def test_with_many_linears_rounding_up_costs_little() -> None:
    random = np.random.default_rng(0)
    losses = [[0.0, float(x)] for x in random.random(4000)]
    plan = make_plan(problem_of(losses, 0.5), PlanSettings(policy="greedy"))
    assert 0.0 <= plan.gap < 1e-3
