"""Tied linears: the plan is the best of those that give each group one option."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem, read_problem, write_problem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import name_of, problem_of

TIES = ((name_of(0), name_of(1)), (name_of(3), name_of(4)))


def tied(seed: int, target: float = 0.6) -> PlanningProblem:
    draw = np.random.default_rng(seed)
    losses = [[0.0, float(loss)] for loss in draw.uniform(0.1, 1.0, 6)]
    flops = [float(f) for f in draw.integers(1, 5, 6)]
    problem = problem_of(losses, target, stages=[0, 0, 0, 1, 1, 1], flops=flops)
    return problem.model_copy(update={"ties": TIES})


def best(problem: PlanningProblem) -> float:
    """The least quality loss of all assignments, by trying each."""
    total = sum(row.flops for row in problem.linears)
    found = []
    for columns in itertools.product(range(2), repeat=len(problem.linears)):
        by_name = dict(zip(problem.names, columns, strict=True))
        if any(len({by_name[name] for name in names}) > 1 for names in problem.ties):
            continue
        costs = [
            list(row.options.values())[column]
            for row, column in zip(problem.linears, columns, strict=True)
        ]
        saved = sum(c.saving * r.flops for c, r in zip(costs, problem.linears, strict=True))
        if saved >= problem.target * total - 1e-9:
            found.append(sum(float(cost.quality_loss or 0.0) for cost in costs))
    return min(found)


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_the_best_of_all_with_ties(seed: int) -> None:
    problem = tied(seed)
    plan = make_plan(problem, PlanSettings(gap=0.0))
    assert not find_violations(plan, problem, PlanSettings(gap=0.0))
    assert plan.objective == pytest.approx(best(problem))
    assert set(plan.linears) == set(problem.names)
    for names in TIES:
        assert len({plan.linears[name] for name in names}) == 1


def test_a_pin_of_one_holds_for_all_and_two_can_conflict() -> None:
    problem = tied(0, target=0.0)
    high, low = problem.linears[0].options
    pins = ((TIES[0][1], low),)
    plan = make_plan(problem, PlanSettings(pins=pins))
    assert {str(plan.linears[name]) for name in TIES[0]} == {low}
    # The message has the pins as they were given, not those of the groups' first linears.
    both = ((f"*{TIES[0][1]}", low), (TIES[0][0], high), ("*", low))
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(problem, PlanSettings(pins=both))
    given = {f"pin {glob}={option}" for glob, option in both}
    assert len(caught.value.conflicts) == 2 and given.issuperset(caught.value.conflicts)


def test_a_file_has_the_ties(tmp_path: Path) -> None:
    problem = tied(0)
    path = tmp_path / "problem.json"
    write_problem(problem, path)
    assert read_problem(path) == problem
    untied = problem.model_copy(update={"ties": ()})
    write_problem(untied, path)
    assert "ties" not in json.loads(path.read_text()) and read_problem(path) == untied
    with pytest.raises(UsageError, match="'nobody' is no linear"):
        PlanningProblem.from_dict({**problem.to_dict(), "ties": [["nobody", TIES[0][0]]]})
