import numpy as np
import pytest

from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.menu import make_menu
from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.search import Search, SolverSettings
from megatron_snip.planning.stages import CoupledSearch
from megatron_snip.planning.task import Task
from tests.unit.planning.build import rules_of
from tests.unit.planning.instances import random_instance


def solver() -> SolverSettings:
    return SolverSettings(workers=1, seed=0, deadline=Deadline(600.0))


def coupled_task(seed: int, num_linears: int, balance: str, changes: int) -> Task | None:
    problem = random_instance(seed, num_linears=num_linears).problem
    previous = ["fp4" if i % 3 == 0 else "fp8" for i in range(num_linears)]
    given = rules_of(problem, previous, pipeline_balance=balance, max_changes=changes, target=0.6)
    return None if most_gain(given.task()) is None else given.checked_task()


@pytest.mark.parametrize("balance", ["stage", "bottleneck"])
def test_pricing_what_couples_stages_agrees_with_solving_them_together(balance: str) -> None:
    solved = 0
    for seed in range(16):
        task = coupled_task(seed, 16, balance, changes=8)
        if task is None:
            continue
        menu, start = make_menu(task), most_gain(task)
        if not menu.floor_lines or not menu.common_lines:
            continue
        whole, apart = Search(menu, [start]), CoupledSearch(menu, [start])
        whole.improve(5.0, solver())
        apart.improve(5.0, solver())
        assert whole.optimal
        assert apart.optimal
        assert apart.loss == pytest.approx(whole.loss, rel=1e-9, abs=whole.tolerance)
        assert apart.bound <= whole.loss + whole.tolerance
        assert menu.holds(apart.best)
        solved += 1
    assert solved >= 4


def test_the_priced_bound_is_at_least_the_relaxation_s() -> None:
    raised = 0
    for seed in range(14):
        task = coupled_task(seed, 40, "stage", changes=14)
        if task is None:
            continue
        search = CoupledSearch(make_menu(task), [most_gain(task)])
        relaxed = search.bound
        search._generate(5.0, solver(), 0.0)
        assert relaxed <= search.bound <= search.loss
        raised += search.bound > relaxed + search.tolerance
    assert raised >= 2


def test_without_time_the_start_is_kept() -> None:
    task = next(t for s in range(20) if (t := coupled_task(s, 16, "stage", 8)) is not None)
    search = CoupledSearch(make_menu(task), [most_gain(task)])
    loss = search.loss
    search.improve(0.0, SolverSettings(1, 0, Deadline(0.0)))
    assert search.loss <= loss
    assert search.menu.holds(search.best)
    assert np.isfinite(search.bound)
