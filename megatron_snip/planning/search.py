"""Find the best assignment of a task, and prove how good it is.

The linears are one choice set, or one for each pipeline stage where stages are independent. Each
choice set has a search of its own:

    dual         a lower bound, and its growth if a choice is forced (`lagrangian.py`)
    incumbent    the best known assignment; at first the best of the hint, of the assignment of most
                 gain, which is always feasible, and of those next to the dual's maximum
    core         a choice whose reduced cost exceeds (incumbent - bound) is in no better assignment
                 and is left out. Linears with one choice left are fixed; CP-SAT solves the others,
                 the most promising choices first

The gap between dual and incumbent is a fraction of one linear's cost, so of a model with ten
thousand linears a few dozen are in the core. All searches share a fixed amount of work, counted in
CP-SAT's deterministic seconds; they continue, the largest gap first, only while the total gap is
larger than asked for. So the same input gives the same assignment in every run with one worker. The
wall clock only ends a search that would take too long.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_snip.planning.constraints import Task, assignment_of_most_gain
from megatron_snip.planning.cpsat import Core, Effort, solve_core
from megatron_snip.planning.lagrangian import ChoiceSet, Dual, make_choices, maximize
from megatron_snip.planning.option_table import Ints, Mask
from megatron_snip.planning.plan import Status
from megatron_snip.planning.settings import PlanSettings

SEARCH_WORK_S = 0.5
"""Deterministic seconds for finding and proving the optimum, over all choice sets."""

CORE_SIZES = (64, 512, 4096, None)
"""Largest number of choices in the core of each round. Every linear also keeps its choice of least
reduced cost, which is not counted."""

EXACT = 1e-9
"""Gap at which an assignment is optimal, relative to the sum of the chosen costs' magnitudes."""


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment and its proof.

    Attributes:
        columns: The chosen column of each linear, [n].
        status: `optimal` if no better assignment exists, up to a relative `EXACT`.
        bound: A lower bound on the cost of every assignment of the task.
    """

    columns: Ints
    status: Status
    bound: float


def solve(task: Task, settings: PlanSettings, hint: Ints | None, deadline: float) -> Solution:
    """Minimize the cost.

    Args:
        task: A feasible task.
        settings: Workers, seed and the gap that is good enough are used.
        hint: An assignment ([n] columns) that may be good, such as the previous plan's; or None.
        deadline: Value of `time.monotonic()` at which the incumbent is returned.
    """
    start = assignment_of_most_gain(task)
    assert start is not None, "checked tasks are feasible"
    starts = [start] if hint is None else [start, hint]
    searches = []
    for choices in make_choices(task):
        own_starts = [assignment[choices.linears] for assignment in starts]
        searches.append(Search(choices, own_starts, settings, deadline))

    work = SEARCH_WORK_S
    for k, search in enumerate(searches):
        num_left = len(searches) - k
        work -= search.improve(work / num_left)  # an easy search leaves its work to the others
    _close_gap(searches, settings.gap, deadline)

    columns = start.copy()
    for search in searches:
        columns[search.choices.linears] = search.best
    optimal = all(search.optimal for search in searches)
    bound = math.fsum(search.bound for search in searches)
    return Solution(columns, "optimal" if optimal else "feasible", bound)


def lower_bound(task: Task) -> float:
    """Return the dual's lower bound on the cost of every assignment of a feasible task."""
    return math.fsum(maximize(choices).bound for choices in make_choices(task))


def _close_gap(searches: "Sequence[Search]", gap: float, deadline: float) -> None:
    """Improve the searches with the largest gaps until the total gap is small enough."""
    unsolved = [search for search in searches if not search.optimal]
    for search in sorted(unsolved, key=lambda search: -search.gap):  # fewest searches to close it
        total = math.fsum(each.best_cost for each in searches)
        excess = math.fsum(each.gap for each in searches) - gap * abs(total)
        if excess <= 0 or time.monotonic() >= deadline:
            return
        # This search alone need not close more than the excess.
        search.improve(math.inf, max(0.0, search.gap - excess))


class Search:
    """The best known assignment of a choice set and a bound, improved on demand.

    Attributes:
        choices: The choices and constraints.
        best: The incumbent, [m] columns.
        best_cost: The incumbent's cost.
        bound: A proven lower bound on the cost of every assignment that meets the constraints.
        optimal: Whether the incumbent is proven best.

    Args:
        choices: The choices and constraints.
        starts: Assignments ([m] columns), at least one of which meets the constraints.
        settings: Workers and seed are used.
        deadline: Value of `time.monotonic()` at which the search stops.
    """

    def __init__(
        self,
        choices: ChoiceSet,
        starts: Sequence[Ints],
        settings: PlanSettings,
        deadline: float,
    ) -> None:
        self.choices = choices
        self._settings = settings
        self._deadline = deadline
        self._dual = maximize(choices)
        self.bound = self._dual.bound
        candidates = [choices.without_unusable(start) for start in starts]
        # Of equal costs the first one stays, so a hint comes before what the dual finds.
        candidates += [self._dual.above, self._dual.below, round_up(choices, self._dual)]
        self.best = min(filter(choices.holds, candidates), key=choices.cost_of)
        self.best_cost = choices.cost_of(self.best)
        self._tolerance = EXACT * float(np.abs(choices.cost[choices.rows, self.best]).sum())
        self.optimal = self.gap <= self._tolerance

    @property
    def gap(self) -> float:
        """Incumbent minus bound, absolute."""
        return max(0.0, self.best_cost - self.bound)

    def improve(self, work: float, good_gap: float = 0.0) -> float:
        """Solve cores, from a small one to the complete one.

        Args:
            work: deterministic seconds that may be used.
            good_gap: stop where the absolute gap is this small.

        Returns:
            Deterministic seconds used.
        """
        used = 0.0
        for size in CORE_SIZES:
            left = self._deadline - time.monotonic()
            if self.optimal or self.gap <= good_gap or used >= work or left <= 0:
                break
            open_ = self.open_choices()
            part = self._most_promising(open_, size)
            is_complete = bool((part == open_).all())
            effort = Effort(self._settings, left, work - used, good_gap)
            used += self._solve(part, is_complete, effort)
            if is_complete:
                break
        return used

    def open_choices(self) -> Mask:
        """Return the choices ([m, k]) that an assignment better than the incumbent can use."""
        cost = self.choices.cost
        least = self.choices.cost.min(axis=1)
        # bound + reduced cost is a lower bound on every assignment with the choice: above the
        # incumbent's cost, the choice is in no better one.
        open_ = np.isfinite(cost) & (self._dual.reduced <= self.gap + self._tolerance)
        # With all other linears at their cheapest, a choice must not cost more than the incumbent.
        slack = self.best_cost - math.fsum(least) + self._tolerance
        open_ &= cost - least[:, None] <= slack
        open_[self.choices.rows, self.best] = True
        return open_

    def _solve(self, part: Mask, is_complete: bool, effort: Effort) -> float:
        """Solve the core of some choices, the incumbent's among them; return deterministic seconds.

        Args:
            part: The choices ([m, k]).
            is_complete: Whether they include every open choice, so that a bound holds for all.
            effort: Limits of the solve.
        """
        choices = self.choices
        counts = part.sum(axis=1)
        free = np.flatnonzero(counts > 1)
        fixed = np.flatnonzero(counts == 1)
        if not len(free):  # the only assignment is the incumbent
            if is_complete:
                self.optimal = True
                self.bound = self.best_cost
            return 0.0
        found = self.best.copy()
        found[fixed] = part[fixed].argmax(axis=1)

        # The core numbers the choices of free linears 0, 1, 2, ...: linear after linear.
        rows, columns = np.nonzero(part[free])
        number = np.zeros(part[free].shape, dtype=np.int64)
        number[rows, columns] = np.arange(len(rows))
        owner = free[rows]
        still_missing = choices.missing(found, fixed)  # what free linears must gain
        core = Core(
            starts=np.concatenate(([0], np.cumsum(counts[free]))),
            cost=choices.cost[owner, columns],
            gains=choices.gains[owner, columns],
            floor=still_missing,
            hint=number[np.arange(len(free)), self.best[free]],
        )
        answer = solve_core(core, effort)

        if answer.choices is not None:
            found[free] = columns[answer.choices]
            assert choices.holds(found), "the solver's assignment breaks an integer constraint"
            if choices.cost_of(found) < self.best_cost:
                self.best = found
                self.best_cost = choices.cost_of(found)
        if is_complete:
            cost_of_fixed = math.fsum(choices.cost[fixed, found[fixed]])
            # The core's bound holds for assignments of open choices. All others cost no less than
            # the incumbent, so the smaller of the two bounds every assignment.
            self.bound = max(self.bound, min(self.best_cost, cost_of_fixed + answer.bound))
            self.optimal = answer.proven
        self.optimal = self.optimal or self.gap <= self._tolerance
        return answer.deterministic_s

    def _most_promising(self, open_: Mask, size: int | None) -> Mask:
        """Return the `size` open choices of least reduced cost, and each linear's cheapest."""
        reduced = self._dual.reduced
        rows = self.choices.rows
        cheapest = np.zeros_like(open_)
        cheapest[rows, reduced.argmin(axis=1)] = True
        others = np.sort(reduced[open_ & ~cheapest])
        if size is None or len(others) <= size:
            return open_
        # Choices as good as the last one come too, so the part does not depend on their order.
        part: Mask = open_ & ((reduced <= others[size - 1]) | cheapest)
        part[rows, self.best] = True
        return part


def round_up(choices: ChoiceSet, dual: Dual) -> Ints:
    """Move linears from the dual's `below` to its `above` until the floor is reached.

    Linears of largest gain are moved first, as long as a gain is not larger than what is missing.
    """
    # At the dual's price equal linears tie, and moving all of them would gain more than is needed.
    columns = dual.below.copy()
    lacking = choices.missing(columns)
    step = choices.gains_of(dual.above) - choices.gains_of(columns)
    skipped: int | None = None
    for i in np.argsort(-step, kind="stable").tolist():
        if step[i] <= 0:
            break
        if step[i] <= lacking:
            columns[i] = dual.above[i]
            lacking -= int(step[i])
        elif lacking > 0:
            skipped = i  # the last one stays: it gains least
    if skipped is not None and lacking > 0:  # one move too large is better than a floor missed
        columns[skipped] = dual.above[skipped]
    return columns
