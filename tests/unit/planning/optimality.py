"""Whether `make_plan` finds the optimum: against enumeration, and against HiGHS."""

import pytest

from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.planner import make_plan
from tests.unit.planning.instances import Instance
from tests.unit.planning.oracle import brute_force, highs_model, num_changes


def check_against_enumeration(instance: Instance) -> None:
    problem = instance.problem
    rules = instance.settings
    previous = instance.previous
    assignments = brute_force(problem, rules, previous)
    if assignments is None:
        with pytest.raises(InfeasiblePlanError):
            make_plan(problem, rules, previous)
        return
    losses, changes = assignments
    plan = make_plan(problem, rules, previous)
    known = [c.quality_loss or 0.0 for linear in problem.linears for c in linear.options.values()]
    slack = 1e-9 * (sum(map(abs, known)) + rules.change_penalty * len(problem.linears))
    changed = num_changes(plan, instance)
    wanted = (losses + rules.change_penalty * changes).min()
    assert plan.status == "optimal"
    assert plan.objective + rules.change_penalty * changed == pytest.approx(wanted, abs=slack)
    assert plan.bound <= losses[changes <= changed].min() + slack
    assert plan.objective - plan.bound <= slack
    assert find_violations(plan, problem, rules) == []


def check_against_highs(instance: Instance) -> bool:
    """Return whether there was a plan to compare."""
    problem = instance.problem
    rules = instance.settings
    previous = instance.previous
    solve, largest_loss = highs_model(problem, rules, previous) or (lambda: None, 0.0)
    wanted = solve()
    if wanted is None:
        with pytest.raises(InfeasiblePlanError):
            make_plan(problem, rules, previous)
        return False
    plan = make_plan(problem, rules, previous)
    paid = rules.change_penalty * num_changes(plan, instance)
    # HiGHS stops at an absolute gap of 1e-6 of the largest loss, and may miss by as much.
    slack = 2e-6 * largest_loss
    assert wanted - 2e-2 * abs(wanted) - slack <= plan.objective + paid <= wanted + slack
    assert plan.bound + paid <= wanted + slack
    return True
