"""The dual against the linear relaxation solved by HiGHS, and its promises against enumeration."""

import itertools

import numpy as np
import pytest
import scipy.optimize

from megatron_snip.planning.lagrangian import maximize
from megatron_snip.planning.menu import Menu, make_menu
from megatron_snip.planning.reach import most_gain
from tests.unit.planning.build import problem_of, rules_of
from tests.unit.planning.instances import random_instance
from tests.unit.planning.test_reach import SEEDS, assignments, rules


def relaxation(menu: Menu) -> float:
    """Return the optimum of the menu's linear relaxation."""
    rows, columns = np.nonzero(np.isfinite(menu.cost))
    loss = menu.cost[rows, columns]
    scale = np.abs(loss).max() or 1.0
    owner = (rows[None, :] == np.arange(len(menu.cost))[:, None]).astype(float)
    lines, thresholds = [], []
    for line in menu.lines:
        dense = np.zeros(menu.cost.shape)
        dense[line.members] = line.coefficients
        size = max(1.0, float(np.abs(dense).max()))
        lines.append(-dense[rows, columns] / size)
        thresholds.append(-line.threshold / size)
    result = scipy.optimize.linprog(
        loss / scale,
        A_ub=np.array(lines) if lines else None,
        b_ub=np.array(thresholds) if lines else None,
        A_eq=owner,
        b_eq=np.ones(len(menu.cost)),
        method="highs",
    )
    assert result.status == 0, result.message
    return float(result.fun) * scale


@pytest.mark.parametrize("balance", ["none", "stage", "bottleneck"])
@pytest.mark.parametrize("max_changes", [None, 9])
def test_the_maximum_is_the_linear_relaxation_s_optimum(
    balance: str, max_changes: int | None
) -> None:
    tried = 0
    for seed in range(30):
        problem = random_instance(seed, num_linears=30).problem
        previous = ["fp4" if i % 3 else "fp8" for i in range(30)]
        given = rules_of(problem, previous, pipeline_balance=balance, max_changes=max_changes)
        if most_gain(given.task()) is None:
            continue
        menu = make_menu(given.checked_task())
        wanted = relaxation(menu)
        size = float(np.nan_to_num(menu.cost, posinf=0.0).max(axis=1).sum())
        assert maximize(menu).bound == pytest.approx(wanted, abs=1e-7 * size), seed
        tried += 1
    assert tried >= 5


def test_the_bound_and_the_reduced_costs_hold_for_every_assignment() -> None:
    checked = 0
    for seed, balance in itertools.product(SEEDS, ("none", "stage", "bottleneck")):
        given = rules(seed, balance)
        if most_gain(given.task()) is None:
            continue
        task = given.checked_task()
        menu = make_menu(task)
        dual = maximize(menu)
        for columns in assignments(task.table):
            if menu.holds(columns):
                extra = dual.reduced[menu.positions, columns].max()
                loss = menu.loss(columns)
                slack = 1e-9 * (1e-30 + np.abs(menu.cost[menu.positions, columns]).sum())
                assert dual.bound <= loss + slack, seed
                assert dual.bound + extra <= loss + slack + 1e-9 * extra, seed
        checked += 1
    assert checked > 40


def test_equal_linears_are_no_obstacle() -> None:
    menu = make_menu(rules_of(problem_of([[0.0, 1.0]] * 10, target=0.75)).task())
    dual = maximize(menu)
    assert dual.bound == pytest.approx(8.0)  # 7.5 linears, rounded up by the integer threshold
    assert menu.holds(dual.above)


def test_a_target_that_costs_nothing_has_no_price() -> None:
    menu = make_menu(rules_of(problem_of([[1.0, 0.0]] * 3, target=1.0)).task())
    dual = maximize(menu)
    assert dual.bound == 0.0
    assert dual.prices.overall == 0.0
    assert menu.holds(dual.below)
