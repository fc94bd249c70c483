"""Find the best assignment of a task, and prove how good it is.

    menus        choices without the superfluous ones; one menu a stage where stages are independent
    dual         a lower bound, and by how much it grows if a choice is forced (`lagrangian.py`)
    incumbent    the best known assignment; at first one next to the dual's maximum
    core         a choice whose reduced cost exceeds (incumbent - bound) is in no better assignment
                 and is dropped; what is left goes to CP-SAT, the most promising choices first

The gap between dual and incumbent is a fraction of one linear's loss, so that the core of a model
with ten thousand linears is a few dozen of them.

Work is counted in CP-SAT's deterministic seconds, so that the same input gives the same assignment
on any run (one worker). The wall clock only ends a search that would take too long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.cpsat import Core, CoreRow, Effort, solve_core
from megatron_snip.planning.lagrangian import Dual, maximize
from megatron_snip.planning.menu import Menu, make_menus
from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.table import Ints, Mask
from megatron_snip.planning.task import Task

_CORE_SIZES = (64, 512, 4096, None)
"""How many choices beside the dual's favourites a core may hold, round by round."""

_WORK_S = 4.0
"""Deterministic seconds spent on finding and proving the optimum, over all menus. Past them the
search goes on only while the gap is larger than asked for."""

_EXACT = 1e-9
"""Relative gap at which an assignment counts as optimal."""


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
    searches = [_Search(menu, starts) for menu in make_menus(task)]
    work = _WORK_S
    for k, search in enumerate(searches):
        work -= search.improve(work / (len(searches) - k), settings, deadline, 0.0)
    _close_gap(searches, settings, deadline)
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
    return math.fsum(maximize(menu).bound for menu in make_menus(task))


def _close_gap(searches: list[_Search], settings: PlanSettings, deadline: Deadline) -> None:
    """Spend the time that is left where the gap is largest, until the whole is good enough."""
    open_ = [search for search in searches if not search.optimal]
    for search in sorted(open_, key=lambda search: -search.gap):
        total = math.fsum(each.loss for each in searches)
        excess = math.fsum(each.gap for each in searches) - settings.gap * abs(total)
        if excess <= 0 or deadline.left() <= 0:
            return
        search.improve(math.inf, settings, deadline, max(0.0, search.gap - excess))


class _Search:
    """The search in one menu.

    Attributes:
        menu: the choices.
        best: [m], the incumbent.
        loss: its quality loss.
        bound: proven lower bound.
        optimal: whether the incumbent is proven best.
        error: largest scaling error of a core that moved incumbent or bound.
    """

    def __init__(self, menu: Menu, starts: list[Ints]) -> None:
        self.menu = menu
        self._dual: Dual = maximize(menu)
        self.bound = self._dual.bound
        self.error = 0.0
        candidates = [menu.without_superfluous(start[menu.linears]) for start in starts]
        candidates += [self._dual.above, self._dual.below, round_up(menu, self._dual)]
        held = [c for c in candidates if menu.holds(c)]
        self.best = min(held, key=menu.loss)
        self.loss = menu.loss(self.best)
        self.optimal = self._good_enough()

    @property
    def gap(self) -> float:
        """Incumbent minus bound, absolute."""
        return max(0.0, self.loss - self.bound)

    def improve(
        self, work: float, settings: PlanSettings, deadline: Deadline, absolute_gap: float
    ) -> float:
        """Search on; return the deterministic seconds used.

        Args:
            work: deterministic seconds that may be used.
            settings: workers and seed.
            deadline: wall-clock limit.
            absolute_gap: stop where the gap is this small.
        """
        used = 0.0
        for size in _CORE_SIZES:
            keep = self._open_choices()
            part = self._most_promising(keep, size)
            complete = bool((part == keep).all())
            if self.optimal or self.gap <= absolute_gap or used >= work or deadline.left() <= 0:
                break
            effort = Effort(
                deadline.left(), work - used, settings.workers, settings.seed, absolute_gap
            )
            used += self._solve_core(part, complete, effort)
            if complete:
                break
        return used

    def _good_enough(self) -> bool:
        return self.loss - self.bound <= _EXACT * abs(self.loss)

    def _open_choices(self) -> Mask:
        """[m, k], the choices that an assignment better than the incumbent can use."""
        menu = self.menu
        slack = self.gap + 1e-9 * abs(self.loss)
        keep = np.isfinite(menu.cost) & (self._dual.reduced <= slack)
        # Nor can a better one hold a choice that alone costs more than the whole incumbent.
        above = menu.cost - menu.cost.min(axis=1, keepdims=True)
        least = math.fsum(menu.cost.min(axis=1))
        keep &= above <= (self.loss - least) * (1 + 1e-9)
        keep[menu.positions, self.best] = True
        return keep

    def _most_promising(self, keep: Mask, size: int | None) -> Mask:
        """Return the open choices of least reduced cost, the favourites and the incumbent's."""
        favourite = np.zeros_like(keep)
        favourite[self.menu.positions, self._dual.reduced.argmin(axis=1)] = True
        others = np.sort(self._dual.reduced[keep & ~favourite])
        if size is None or len(others) <= size:
            return keep
        part: Mask = keep & (self._dual.reduced <= others[size - 1])
        part |= keep & favourite
        part[self.menu.positions, self.best] = True
        return part

    def _solve_core(self, part: Mask, complete: bool, effort: Effort) -> float:
        menu = self.menu
        free = np.flatnonzero(part.sum(axis=1) > 1)
        fixed = np.flatnonzero(part.sum(axis=1) == 1)
        settled = part[fixed].argmax(axis=1)
        base = math.fsum(menu.cost[fixed, settled])
        if not len(free):
            self._learn(self.best, self.loss, complete, True)
            return 0.0
        rows, columns = np.nonzero(part[free])
        sizes = part[free].sum(axis=1)
        lines = tuple(
            CoreRow(
                line.coefficients[free[rows], columns],
                line.threshold - int(line.coefficients[fixed, settled].sum()),
            )
            for line in menu.lines
        )
        number = np.full(part[free].shape, -1, dtype=np.int64)
        number[rows, columns] = np.arange(len(rows))
        hint = number[np.arange(len(free)), self.best[free]]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        answer = solve_core(Core(starts, menu.cost[free[rows], columns], lines, hint), effort)
        self.error = max(self.error, answer.error)
        if answer.choices is not None:
            found = self.best.copy()
            found[fixed] = settled
            found[free] = columns[answer.choices]
            self._learn(found, base + answer.bound, complete, answer.proven)
        elif complete and not answer.proven:
            self._learn(self.best, base + answer.bound, complete, False)
        return answer.work

    def _learn(self, found: Ints, bound: float, complete: bool, proven: bool) -> None:
        """Take over a better incumbent, and the bound if the core held every open choice."""
        assert self.menu.holds(found), "CP-SAT keeps to integer constraints"
        loss = self.menu.loss(found)
        if loss < self.loss:
            self.best, self.loss = found, loss
        if complete:
            self.bound = max(self.bound, min(self.loss, bound))
            self.optimal = proven
        self.optimal = self.optimal or self._good_enough()


def round_up(menu: Menu, dual: Dual) -> Ints:
    """Go from the dual's `below` towards its `above`, one linear at a time, until nothing lacks.

    Linears that gain most go first if that does not overshoot; one that does closes the search,
    the least that suffices. With ties at the dual's price (equal linears) this finds what
    switching all of them at once would overshoot by far.
    """
    columns = dual.below.copy()
    for line in menu.lines:
        gains = line.coefficients
        positions = menu.positions
        lacking = line.threshold - int(gains[positions, columns].sum())
        step = gains[positions, dual.above] - gains[positions, columns]
        order = [i for i in np.argsort(-step, kind="stable") if step[i] > 0]
        skipped = []
        for i in order:
            if 0 < step[i] <= lacking:
                columns[i] = dual.above[i]
                lacking -= int(step[i])
            else:
                skipped.append(i)
        if lacking > 0 and skipped:
            columns[skipped[-1]] = dual.above[skipped[-1]]
    return columns
