import numpy as np
import pytest

from megatron_snip.planning import solve as solve_module
from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.menu import make_menu
from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.search import Search
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solve import lower_bound, solve
from megatron_snip.planning.stages import CoupledSearch
from tests.unit.planning.build import problem_of, rules_of
from tests.unit.planning.instances import random_instance

RANDOM = np.random.default_rng(0)
LOSSES = [[0.0, float(loss)] for loss in RANDOM.random(12)]
STAGES = [i // 3 for i in range(12)]


def parts(**settings: object) -> list[Search]:
    problem = problem_of(LOSSES, target=0.5, stages=STAGES)
    previous = ["fp8"] * 12 if "max_changes" in settings else None
    task = rules_of(problem, previous, **settings).checked_task()
    return solve_module._searches(task, [most_gain(task)])


def test_stages_are_searched_apart_where_nothing_couples_them() -> None:
    assert len(parts()) == 1
    assert len(parts(pipeline_balance="stage")) == 4
    assert isinstance(parts(pipeline_balance="stage", max_changes=9)[0], CoupledSearch)
    assert not isinstance(parts(max_changes=9)[0], CoupledSearch)


def test_searching_stages_apart_finds_what_searching_them_together_finds() -> None:
    for seed in range(8):
        problem = random_instance(seed, num_linears=24).problem
        rules = rules_of(problem, pipeline_balance="stage")
        if most_gain(rules.task()) is None:
            continue
        task = rules.checked_task()
        apart = solve(task, PlanSettings(), None, Deadline(600.0))
        whole = Search(make_menu(task), [most_gain(task)])
        whole.improve(5.0, solve_module.SolverSettings(1, 0, Deadline(600.0)))
        loss = task.table.quality_loss(apart.columns)
        assert apart.optimal
        assert whole.optimal
        assert loss == pytest.approx(whole.loss, abs=whole.tolerance)
        assert task.holds(apart.columns)
        assert lower_bound(task) <= apart.bound <= loss


def test_an_expired_deadline_still_gives_a_feasible_plan_with_a_bound() -> None:
    task = rules_of(random_instance(2, num_linears=60).problem, pipeline_balance="stage").task()
    found = solve(task, PlanSettings(), None, Deadline(0.0))
    assert task.holds(found.columns)
    assert found.bound <= task.table.quality_loss(found.columns)


def test_past_the_fixed_work_the_search_goes_on_only_for_the_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solve_module, "POLISH_WORK_S", 0.0)
    improved = 0
    for seed in range(12):
        rules = rules_of(random_instance(seed, num_linears=40).problem)
        if most_gain(rules.task()) is None:
            continue
        task = rules.checked_task()
        rough = solve(task, PlanSettings(gap=1e9), None, Deadline(600.0))
        close = solve(task, PlanSettings(gap=1e-6), None, Deadline(600.0))
        losses = [task.table.quality_loss(found.columns) for found in (rough, close)]
        size = float(np.abs(task.table.quality[np.arange(40), close.columns]).sum())
        assert losses[1] - close.bound <= 1e-6 * max(abs(losses[1]), 1e-3 * size)
        assert losses[1] <= losses[0]
        improved += losses[1] < losses[0]
    assert improved >= 2


def test_a_good_hint_is_taken_up() -> None:
    rules = rules_of(problem_of(LOSSES, target=0.5))
    task = rules.checked_task()
    best = solve(task, PlanSettings(), None, Deadline(600.0))
    again = solve(task, PlanSettings(), best.columns, Deadline(0.0))
    assert task.table.quality_loss(again.columns) == task.table.quality_loss(best.columns)
