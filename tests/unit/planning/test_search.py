from dataclasses import replace

import numpy as np

from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.lagrangian import maximize
from megatron_snip.planning.menu import Menu, make_menu
from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.search import Search, SolverSettings, round_up
from tests.unit.planning.build import problem_of, rules_of
from tests.unit.planning.instances import random_instance


def solver() -> SolverSettings:
    return SolverSettings(workers=1, seed=0, deadline=Deadline(600.0))


def search(menu: Menu) -> Search:
    richest = np.where(np.isfinite(menu.cost), menu.gain, -np.inf).argmax(axis=1)
    return Search(menu, [richest])


def menu_of(seed: int, num_linears: int = 40) -> Menu | None:
    problem = random_instance(seed, num_linears=num_linears).problem
    task = rules_of(problem).task()
    return None if most_gain(task) is None else make_menu(task)


def test_the_incumbent_only_improves_and_the_bound_only_rises() -> None:
    improved = 0
    for seed in range(20):
        menu = menu_of(seed)
        if menu is None:
            continue
        found = search(menu)
        loss, bound = found.loss, found.bound
        assert menu.holds(found.best)
        found.improve(5.0, solver())
        assert menu.holds(found.best)
        assert found.loss == menu.loss(found.best) <= loss
        assert bound <= found.bound <= found.loss
        assert found.optimal
        improved += found.loss < loss
    assert improved >= 3


def test_without_work_the_incumbent_stays() -> None:
    menu = menu_of(3)
    assert menu is not None
    found = search(menu)
    loss = found.loss
    assert found.improve(0.0, solver()) == 0.0
    assert found.loss == loss
    expired = SolverSettings(1, 0, Deadline(0.0))
    assert found.improve(5.0, expired) == 0.0


def test_choices_outside_the_core_cannot_improve_the_incumbent() -> None:
    dropped = 0
    for seed in range(12):
        menu = menu_of(seed, num_linears=8)
        if menu is None:
            continue
        found = search(menu)
        keep = found.open_choices(np.full(8, found.gap))
        for row, column in np.argwhere(np.isfinite(menu.cost) & ~keep):
            cost = menu.cost.copy()
            cost[row] = np.inf
            cost[row, column] = menu.cost[row, column]
            forced = replace(menu, cost=cost)
            richest = np.where(np.isfinite(cost), menu.gain, -np.inf).argmax(axis=1)
            if forced.holds(richest):
                other = Search(forced, [richest])
                other.improve(5.0, solver())
                assert other.loss >= found.loss - found.tolerance, seed
                dropped += 1
    assert dropped > 20


def test_ties_are_rounded_up_one_by_one() -> None:
    menu = make_menu(rules_of(problem_of([[0.0, 1.0]] * 10, target=0.75)).task())
    columns = round_up(menu, maximize(menu))
    assert columns.sum() == 8
    assert search(menu).optimal  # which proves it without CP-SAT
