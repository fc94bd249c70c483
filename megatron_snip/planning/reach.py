"""How far efficiency can go: feasibility, best target and bottleneck, exactly and without a solver.

Without a limit on changes every linear takes its largest gain, and that is that. With at most N
changes the question is which linears to change. Only the size of a linear's improvement matters,
so the best k changes inside a stage are its k largest improvements. Hence

    floors:      a stage needs the fewest of its largest improvements that lift it to its floor;
                 what is left of N goes to the largest improvements anywhere.
    max-min:     (best target under stage balance, least time of the slowest stage) hand out the N
                 changes one by one, each to the stage that is worst at that moment.

All are exchange arguments over sorted lists: O(n log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from megatron_snip.planning.cost import NOISE
from megatron_snip.planning.table import Ints, Mask
from megatron_snip.planning.task import Task

_KeyOfStage = Callable[[int, Fraction], Fraction]


@dataclass(frozen=True)
class _Moves:
    """Where an assignment starts and which changes could still improve its gain.

    Attributes:
        start: [n], columns before any optional change.
        best: [n], column of the largest gain.
        candidates: rows that gain by changing, largest improvement first.
        budget: how many of them may change.
    """

    start: Ints
    best: Ints
    candidates: Ints
    budget: int


def most_gain(task: Task) -> Ints | None:
    """Return an assignment that keeps to every rule with as much gain as possible, or None.

    Returns:
        [n] columns, or None exactly if no assignment keeps to the rules.
    """
    moves = _moves(task)
    if moves is None:
        return None
    columns = moves.start.copy()
    forced = _forced_by_floors(task, moves)
    if forced is None or len(forced) > moves.budget:
        return None
    columns[forced] = moves.best[forced]
    chosen = set(forced.tolist())
    rest = [row for row in moves.candidates.tolist() if row not in chosen]
    spare = rest[: moves.budget - len(forced)]
    columns[spare] = moves.best[spare]
    return columns if task.holds(columns) else None


def best_efficiency(task: Task, every_stage: bool) -> float | None:
    """Return the highest target that the task's other rules let a plan reach.

    Args:
        task: its floors and least gain are ignored.
        every_stage: whether each stage must reach the target, or only the model as a whole.

    Returns:
        An efficiency, or None if the other rules already contradict each other.
    """
    free = replace(task, floors=(None,) * len(task.floors), least=None)
    moves = _moves(free)
    if moves is None:
        return None
    if not every_stage:
        columns = most_gain(free)
        assert columns is not None
        return task.table.efficiency(columns)
    weights = task.table.stage_weights
    # "Worst" is the stage of least efficiency; a stage without work is never in the way.
    orders = _Handout(free, moves, lambda p, gain: gain / weights[p] if weights[p] else Fraction(2))
    orders.run(moves.budget)
    return min(1.0, float(min(key for key, _ in orders.heap)))


def bottleneck_floors(task: Task) -> tuple[Fraction | None, ...] | None:
    """Return each stage's floor so that no stage is slower than the slowest one has to be.

    The least time of the slowest stage, over all assignments that keep to the task's rules (its
    overall least gain among them), is T*; a stage of base time b needs gain >= (b - T*) / rate.

    Returns:
        The floors, or None if no assignment keeps to the rules.
    """
    moves = _moves(task)
    if moves is None or most_gain(task) is None:
        return None
    table = task.table
    handout = _Handout(task, moves, lambda p, gain: -(table.stage_bases[p] - table.rate * gain))
    handout.run(moves.budget)
    steps = _most_steps_within_least(task, moves, handout.history)
    handout = _Handout(task, moves, handout.key)
    handout.run(steps)
    slowest = -min(key for key, _ in handout.heap) * (1 + NOISE)
    return tuple((base - slowest) / table.rate for base in table.stage_bases)


def _moves(task: Task) -> _Moves | None:
    """Return the start and the candidates; None if a linear has no choice or N is overdrawn."""
    if not task.allowed.any(axis=1).all():
        return None
    gains = np.where(task.allowed, task.table.overall_row.coefficients, np.iinfo(np.int64).min)
    best = _least_loss_among(task, gains == gains.max(axis=1, keepdims=True))
    rows = np.arange(len(best))
    if task.max_changes is None or task.previous is None:
        return _Moves(best, best, np.empty(0, dtype=np.int64), 0)
    stays = task.counted & task.allowed[rows, np.where(task.counted, task.previous, 0)]
    start = np.where(stays, task.previous, best)
    budget = task.max_changes - int((task.counted & ~stays).sum())
    if budget < 0:
        return None
    improvement = gains[rows, best] - gains[rows, start]
    candidates = np.flatnonzero(stays & (improvement > 0))
    order = np.argsort(-improvement[candidates], kind="stable")
    return _Moves(start, best, candidates[order], budget)


def _least_loss_among(task: Task, mask: Mask) -> Ints:
    """Return, by row, the column of least quality loss where `mask` is True."""
    loss = np.where(mask, np.nan_to_num(task.table.quality, nan=0.0), np.inf)
    columns: Ints = loss.argmin(axis=1)
    return columns


def _forced_by_floors(task: Task, moves: _Moves) -> Ints | None:
    """Return the fewest candidates that lift every stage to its floor; None if some stays below."""
    if not task.has_floors or task.max_changes is None:
        return np.empty(0, dtype=np.int64)
    coefficients = task.table.stage_row.coefficients
    rows = np.arange(len(moves.start))
    start = coefficients[rows, moves.start]
    improvement = coefficients[rows, moves.best] - start
    forced = []
    for p, threshold in enumerate(task.stage_thresholds):
        if threshold is None:
            continue
        lacking = threshold - int(start[task.table.members[p]].sum())
        mine = moves.candidates[task.table.stage[moves.candidates] == p]
        for row in mine:
            if lacking <= 0:
                break
            lacking -= int(improvement[row])
            forced.append(int(row))
        if lacking > 0:
            return None
    return np.array(forced, dtype=np.int64)


class _Handout:
    """Hands out changes one by one, each to the stage whose key is least at that moment.

    Attributes:
        key: (stage, its gain) -> what to compare; grows with gain.
        heap: (key, stage) of every stage.
        history: rows changed so far, in order.
    """

    def __init__(self, task: Task, moves: _Moves, key: _KeyOfStage) -> None:
        self.key = key
        self.history: list[int] = []
        self._gains = list(task.table.stage_gains(moves.start))
        self._improvement = [
            {
                int(row): task.table.gains[row][moves.best[row]]
                - task.table.gains[row][moves.start[row]]
                for row in moves.candidates
                if task.table.stage[row] == p
            }
            for p in range(task.table.num_stages)
        ]
        self._queues = [list(table) for table in self._improvement]
        for queue in self._queues:
            queue.reverse()  # popped from the end, largest first
        used = [p for p, members in enumerate(task.table.members) if len(members)]
        self.heap = [(key(p, self._gains[p]), p) for p in used]
        heapq.heapify(self.heap)

    def run(self, budget: int) -> None:
        """Hand out up to `budget` changes; stop where the worst stage has none left."""
        while len(self.history) < budget:
            stage = self.heap[0][1]
            if not self._queues[stage]:
                return
            row = self._queues[stage].pop()
            self._gains[stage] += self._improvement[stage][row]
            self.history.append(row)
            heapq.heapreplace(self.heap, (self.key(stage, self._gains[stage]), stage))


def _most_steps_within_least(task: Task, moves: _Moves, history: Sequence[int]) -> int:
    """Return how many steps of a handout leave enough changes to reach the overall least gain.

    The more of the budget the handout directs, the less gain the whole can reach, so the answer
    is found by bisection. Zero steps always do, as the task is feasible.
    """
    low, high = 0, len(history)
    while low < high:
        middle = (low + high + 1) // 2
        if _reaches_least(task, moves, history[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _reaches_least(task: Task, moves: _Moves, forced: Sequence[int]) -> bool:
    columns = moves.start.copy()
    chosen = set(forced)
    rest = [row for row in moves.candidates.tolist() if row not in chosen]
    taken = [*forced, *rest[: moves.budget - len(forced)]]
    columns[taken] = moves.best[taken]
    return replace(task, floors=(None,) * len(task.floors)).holds(columns)
