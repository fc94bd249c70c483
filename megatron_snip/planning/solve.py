"""Find the best assignment of a task, and prove how good it is.

    menu      the choices, without the superfluous ones, and the constraints   menu.py
    parts     one search a stage where stages are independent, else one        search.py, stages.py
    polish    search for the optimum, for a fixed amount of work
    close     go on where the gap is largest while the whole is worse than asked for

Work is counted in CP-SAT's deterministic seconds, so that the same input gives the same assignment
on any run (one worker). The wall clock only ends a search that would take too long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.lagrangian import maximize
from megatron_snip.planning.menu import make_menu, stage_menus
from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.search import Search, SolverSettings
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.stages import CoupledSearch
from megatron_snip.planning.table import Ints
from megatron_snip.planning.task import Task

POLISH_WORK_S = 0.5
"""Deterministic seconds spent on finding and proving the optimum, over all parts."""


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment and what is known about it.

    Attributes:
        columns: [n], the chosen column of each linear.
        optimal: whether no better assignment exists, up to `error` and a relative 1e-9.
        bound: lower bound on the quality loss of every assignment of the task.
        error: bound on what integer scaling may have cost, in units of quality loss.
    """

    columns: Ints
    optimal: bool
    bound: float
    error: float


def solve(task: Task, settings: PlanSettings, hint: Ints | None, deadline: Deadline) -> Solution:
    """Minimize the quality loss.

    Args:
        task: feasible.
        settings: workers, seed and the gap that is good enough.
        hint: [n], an assignment that may be good, e.g. the previous plan's; or None.
        deadline: wall-clock limit; when it strikes, the incumbent is returned.
    """
    start = most_gain(task)
    assert start is not None, "checked tasks are feasible"
    starts = [start] if hint is None or np.any(hint < 0) else [start, hint]
    solver = SolverSettings(settings.workers, settings.seed, deadline)
    searches = _searches(task, starts)
    work = POLISH_WORK_S
    for k, search in enumerate(searches):
        work -= search.improve(work / (len(searches) - k), solver)
    _close_gap(searches, settings.gap, solver)
    columns = start.copy()
    for search in searches:
        columns[search.menu.linears] = search.best
    return Solution(
        columns,
        all(search.optimal for search in searches),
        math.fsum(search.bound for search in searches),
        math.fsum(search.error for search in searches),
    )


def lower_bound(task: Task) -> float:
    """Return the dual's lower bound on the quality loss of every assignment of a feasible task."""
    return maximize(make_menu(task)).bound


def _searches(task: Task, starts: list[Ints]) -> list[Search]:
    """Return one search for each part of the task that can be solved alone."""
    menu = make_menu(task)
    if not menu.floor_lines:
        return [Search(menu, starts)]
    if menu.common_lines:
        return [CoupledSearch(menu, starts)]
    return [Search(part, [s[part.linears] for s in starts]) for part in stage_menus(menu)]


def _close_gap(searches: list[Search], gap: float, solver: SolverSettings) -> None:
    """Spend the time that is left where the gap is largest, until the whole is good enough."""
    open_ = [search for search in searches if not search.optimal]
    for search in sorted(open_, key=lambda search: -search.gap):
        total = math.fsum(each.loss for each in searches)
        excess = math.fsum(each.gap for each in searches) - gap * abs(total)
        if excess <= 0 or solver.deadline.left() <= 0:
            return
        search.improve(math.inf, solver, max(0.0, search.gap - excess))
