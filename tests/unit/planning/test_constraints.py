"""Pins, edge layers and targets: what they fix, and what an infeasible problem reports."""

import pytest

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.planning.constraints import max_saving_assignment
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import constraints_of, name_of, options_of, problem_of
from tests.unit.planning.instances import random_instance
from tests.unit.planning.oracle import brute_force

LOSSES = [[0.0, 1.0]] * 4
FORBIDDEN = "forbidden options"


def options(problem: PlanningProblem, **settings: object) -> list[str]:
    return options_of(make_plan(problem, PlanSettings(**settings)))


def conflict(problem: PlanningProblem, **settings: object) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(problem, PlanSettings(**settings))
    assert "\n" not in str(caught.value)
    return caught.value


def test_pins_fix_the_linears_that_match() -> None:
    pins = (("decoder.layers.[23].*", "fp4-fp4-fp4"), ("*.layers.3.*", "fp4"))
    assert options(problem_of(LOSSES), pins=pins) == ["fp8", "fp8", "fp4", "fp4"]
    # bf16 may be pinned where the problem does not list it.
    pins = (("*.layers.0.*", "bf16"),)
    assert options(problem_of(LOSSES, target=0.75), pins=pins) == ["bf16", "fp4", "fp4", "fp4"]


def test_pins_that_cannot_be_met_are_usage_errors() -> None:
    problem = problem_of(LOSSES)
    with pytest.raises(UsageError, match="no linear's name matches"):
        options(problem, pins=(("encoder.*", "fp8"),))
    with pytest.raises(UsageError, match=r"'fp3' is not an option .*fp8, fp4"):
        options(problem, pins=(("*", "fp3"),))


def test_only_stages_that_conflict_are_named() -> None:
    problem = problem_of([[0.0, 1.0], [0.0, 1.0], [0.0, None]], target=0.5, stages=[0, 1, 1])
    error = conflict(problem, pipeline_balance="stage", pins=(("*.layers.1.*", "fp8"),))
    assert error.conflicts == ("target 0.5 in stage 1", "pin *.layers.1.*=fp8", FORBIDDEN)
    assert error.best_target == 0.0


def test_linears_without_an_option_are_named() -> None:
    error = conflict(problem_of([[0.0, 1.0], [None, None]], target=0.0))
    assert (error.conflicts, error.best_target) == ((FORBIDDEN,), None)
    assert name_of(1) in str(error)
    forbidden = problem_of([[0.0, None], [0.0, 1.0]], target=0.0)
    error = conflict(forbidden, pins=(("*.layers.0.*", "fp4"),))
    assert error.conflicts == ("pin *.layers.0.*=fp4", FORBIDDEN)
    pins = (("*.layers.0.*", "fp8"), ("*.layers.0.*", "fp4"), ("*", "fp4"))
    error = conflict(problem_of(LOSSES, target=0.0), pins=pins)
    assert "pin *.layers.0.*=fp8" in error.conflicts and len(error.conflicts) == 2
    assert "no target can be reached" in str(error)


def test_reported_conflicts_are_minimal_and_the_best_target_is_the_largest() -> None:
    checked = 0
    for seed in range(150):
        instance = random_instance(seed)
        problem, settings = instance.problem, instance.settings
        if settings.pipeline_balance == "bottleneck" or brute_force(problem, settings) is not None:
            continue
        error = conflict(problem, **settings.model_dump())
        constraints = constraints_of(problem, **settings.model_dump())
        for left_out in (None, *error.conflicts):
            active = [label for label in error.conflicts if label != left_out]
            feasible = max_saving_assignment(constraints.task(active)) is not None
            assert feasible == (left_out is not None), (seed, left_out)
        if error.best_target is not None:
            best = settings.model_copy(update={"target": error.best_target})
            make_plan(problem, best)
            make_plan(
                problem, settings.model_copy(update={"target": float(str(error).split()[-1])})
            )
            beyond = settings.model_copy(update={"target": error.best_target + 1e-6})
            assert brute_force(problem, beyond) is None
        checked += 1
    assert checked > 20
