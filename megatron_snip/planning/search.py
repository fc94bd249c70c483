"""The search in one menu: dual, incumbent, core, CP-SAT.

    dual         a lower bound, and by how much it grows if a choice is forced (`lagrangian.py`)
    incumbent    the best known assignment; at first one next to the dual's maximum
    core         a choice whose reduced cost exceeds (incumbent - bound) is in no better assignment
                 and is dropped; what is left goes to CP-SAT, the most promising choices first

The gap between dual and incumbent is a fraction of one linear's loss, so that the core of a model
with ten thousand linears is a few dozen of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.cpsat import Core, CoreRow, Effort, solve_core
from megatron_snip.planning.lagrangian import Dual, maximize
from megatron_snip.planning.menu import Line, Menu
from megatron_snip.planning.table import Floats, Ints, Mask

CORE_SIZES = (64, 512, 4096, None)
"""How many choices beside the favourites a core may hold, round by round."""

EXACT = 1e-9
"""Gap, relative to the sum of chosen losses' magnitudes, at which an assignment counts as best."""


@dataclass(frozen=True)
class SolverSettings:
    """What every core is solved with."""

    workers: int
    seed: int
    deadline: Deadline


class Search:
    """The best known assignment of a menu and a bound, improved on demand.

    Attributes:
        menu: the choices and constraints.
        best: [m], the incumbent.
        loss: its cost.
        bound: proven lower bound on the cost of every assignment that keeps to the constraints.
        optimal: whether the incumbent is proven best.
        error: largest scaling error of a core so far.
        tolerance: absolute gap at which the incumbent counts as best.
        dual: the dual's maximum, whose reduced costs say which choices stay open.

    Args:
        menu: the choices and constraints.
        starts: assignments, at least one of which keeps to the constraints.
        tolerance: absolute gap at which the incumbent counts as best; by default `EXACT` of its
            size.
    """

    def __init__(self, menu: Menu, starts: Sequence[Ints], tolerance: float | None = None) -> None:
        self.menu = menu
        self.dual: Dual = maximize(menu)
        self.bound = self.dual.bound
        self.error = 0.0
        self.optimal = False
        candidates = [menu.without_superfluous(start) for start in starts]
        candidates += [self.dual.above, self.dual.below, round_up(menu, self.dual)]
        self.best = min((c for c in candidates if menu.holds(c)), key=menu.loss)
        self.loss = menu.loss(self.best)
        size = float(np.abs(menu.cost[menu.positions, self.best]).sum())
        self.tolerance = EXACT * size if tolerance is None else tolerance
        self._judge()

    @property
    def gap(self) -> float:
        """Incumbent minus bound, absolute."""
        return max(0.0, self.loss - self.bound)

    def improve(self, work: float, solver: SolverSettings, good_gap: float = 0.0) -> float:
        """Search on, from small cores to the complete one.

        Args:
            work: deterministic seconds that may be used.
            solver: workers, seed, deadline.
            good_gap: stop where the absolute gap is this small.

        Returns:
            Deterministic seconds used.
        """
        used = 0.0
        for size in CORE_SIZES:
            if self.optimal or self.gap <= good_gap:
                break
            keep = self.open_choices(np.full(len(self.best), self.gap))
            part = self._most_promising(keep, size)
            left = solver.deadline.left()
            if used >= work or left <= 0:
                break
            effort = Effort(left, work - used, solver.workers, solver.seed, good_gap)
            complete = bool((part == keep).all())
            used += self.solve_core(part, complete, effort)
            if complete:
                break
        return used

    def open_choices(self, slack: Floats) -> Mask:
        """Return the choices that an assignment better than the incumbent can use.

        Args:
            slack: [m], reduced cost that rules a choice out, by linear.

        Returns:
            [m, k]
        """
        menu = self.menu
        limit = (slack + self.tolerance)[:, None]
        keep = np.isfinite(menu.cost) & (self.dual.reduced <= limit)
        # Nor can a better one hold a choice that alone costs more than the whole incumbent.
        least = menu.cost.min(axis=1)
        room = self.loss - math.fsum(least) + self.tolerance
        keep &= menu.cost - least[:, None] <= room
        keep[menu.positions, self.best] = True
        return keep

    def solve_core(self, part: Mask, complete: bool, effort: Effort) -> float:
        """Let CP-SAT choose among `part`; learn from its answer.

        Args:
            part: [m, k], the choices to consider; holds the incumbent's.
            complete: whether they include every open choice, so that a bound is a bound for all.
            effort: limits.

        Returns:
            Deterministic seconds used.
        """
        menu = self.menu
        counts = part.sum(axis=1)
        free, fixed = np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)
        if not len(free):
            self.optimal = self.optimal or complete
            self.bound = self.loss if complete else self.bound
            return 0.0
        settled = part[fixed].argmax(axis=1)
        rows, columns = np.nonzero(part[free])
        found = self.best.copy()
        found[fixed] = settled
        lines = tuple(_core_row(line, found, free, rows, columns) for line in menu.lines)
        number = np.zeros(part[free].shape, dtype=np.int64)
        number[rows, columns] = np.arange(len(rows))
        hint = number[np.arange(len(free)), self.best[free]]
        starts = np.concatenate(([0], np.cumsum(counts[free])))
        answer = solve_core(Core(starts, menu.cost[free[rows], columns], lines, hint), effort)
        self.error = max(self.error, answer.error)
        base = math.fsum(menu.cost[fixed, settled])
        if answer.choices is not None:
            found[free] = columns[answer.choices]
            self.learn(found)
        if complete:
            self.bound = max(self.bound, min(self.loss, base + answer.bound))
            self.optimal = answer.proven
        self._judge()
        return answer.work

    def learn(self, found: Ints) -> None:
        """Take over an assignment if it is better than the incumbent."""
        assert self.menu.holds(found), "an assignment breaks an integer constraint"
        loss = self.menu.loss(found)
        if loss < self.loss:
            self.best, self.loss = found, loss

    def raise_bound(self, bound: float) -> None:
        """Take over a lower bound that was proven elsewhere."""
        self.bound = max(self.bound, min(self.loss, bound))
        self._judge()

    def _judge(self) -> None:
        self.optimal = self.optimal or self.gap <= self.tolerance

    def _most_promising(self, keep: Mask, size: int | None) -> Mask:
        """Return the open choices of least reduced cost, the favourites and the incumbent's."""
        favourite = np.zeros_like(keep)
        favourite[self.menu.positions, self.dual.reduced.argmin(axis=1)] = True
        others = np.sort(self.dual.reduced[keep & ~favourite])
        if size is None or len(others) <= size:
            return keep
        part: Mask = keep & ((self.dual.reduced <= others[size - 1]) | favourite)
        part[self.menu.positions, self.best] = True
        return part


def _core_row(line: Line, columns: Ints, free: Ints, rows: Ints, choices: Ints) -> CoreRow:
    """Restrict a line to the choices of a core.

    Args:
        line: of the menu.
        columns: [m], the assignment whose entries outside `free` are settled.
        free: [f], positions that still choose.
        rows: [c], index into `free` of every choice.
        choices: [c], column of every choice.
    """
    index = np.full(len(columns), -1, dtype=np.int64)
    index[line.members] = np.arange(len(line.members))
    is_free = np.zeros(len(columns), dtype=np.bool_)
    is_free[free] = True
    settled = np.flatnonzero(~is_free[line.members])
    taken = int(line.coefficients[settled, columns[line.members[settled]]].sum())
    at = index[free[rows]]
    coefficients = np.where(at >= 0, line.coefficients[at, choices], 0)
    return CoreRow(coefficients, line.threshold - taken)


def round_up(menu: Menu, dual: Dual) -> Ints:
    """Go from the dual's `below` towards its `above`, one linear at a time, until nothing lacks.

    Linears that gain most go first if they do not overshoot; then the least that suffices closes
    the rest. With ties at the dual's price (equal linears) this finds what switching all of them
    at once would overshoot by far.
    """
    columns = dual.below.copy()
    for line in menu.lines:
        at, members = np.arange(len(line.members)), line.members
        lacking = line.threshold - line.sum(columns)
        step = line.coefficients[at, dual.above[members]] - line.coefficients[at, columns[members]]
        skipped = []
        for i in np.argsort(-step, kind="stable"):
            if lacking <= 0 or step[i] <= 0:
                break
            if step[i] <= lacking:
                columns[members[i]] = dual.above[members[i]]
                lacking -= int(step[i])
            else:
                skipped.append(i)
        if lacking > 0 and skipped:
            columns[members[skipped[-1]]] = dual.above[members[skipped[-1]]]
    return columns
