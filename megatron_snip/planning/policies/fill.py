"""Budget arithmetic that all baselines share.

A baseline is an order of linears. From a start where every linear is at its gentlest option, the
linears are lowered in that order until the floors and the overall least gain are reached, so the
target is overshot by at most one linear (per stage, where stages have floors).

With a limit on changes, the assignment so found is approached from the previous plan. First comes
the target: linears are lowered in the policy's order while something lacks (where that takes too
many changes, the changes of largest gain are made instead, as few as do), or raised where the
previous plan is beyond it. Then linears are lowered as long as each makes room for raisings. So no
linear is lowered without need, and the target is overshot by more than one linear only where the
previous plan did so and the limit leaves no more changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.table import Ints, Mask
from megatron_snip.planning.task import Task


def gentlest(task: Task) -> Ints:
    """Return, by row, the allowed column of least gain; of these the one of least quality loss."""
    gains = np.where(task.allowed, task.table.overall_row.coefficients, np.iinfo(np.int64).max)
    return _least_loss(task, gains == gains.min(axis=1, keepdims=True))


def lowest(task: Task) -> Ints:
    """Return, by row, the allowed column of most gain; of these the one of least quality loss."""
    gains = np.where(task.allowed, task.table.overall_row.coefficients, np.iinfo(np.int64).min)
    return _least_loss(task, gains == gains.max(axis=1, keepdims=True))


def fill(task: Task, start: Ints, steps: Iterable[tuple[int, int]]) -> Ints:
    """Apply steps in order, each only where it is still needed.

    Args:
        task: whose floors and least gain are to be reached.
        start: [n], columns to start from.
        steps: (row, column) in the policy's order; every step gains.

    Returns:
        [n] columns that keep to the floors and the least gain if the steps suffice.
    """
    meter = _Meter(task, start)
    meter.fill(steps, np.zeros_like(start), 0)
    return meter.columns


def within_changes(task: Task, start: Ints, wanted: Ints, order: Sequence[int]) -> Ints:
    """Go from the previous plan towards `wanted`, as far as `max_changes` allows.

    Args:
        task: whose rules are kept.
        start: [n], where linears start whose previous option is not to be had.
        wanted: [n], what the policy would choose without the limit.
        order: rows in the policy's order, the first to be lowered first.

    Returns:
        [n] columns that keep to every rule.
    """
    if task.max_changes is None or task.previous is None or task.holds(wanted):
        return wanted
    walk = _Walk(task, start, wanted, order)
    walk.reach()
    if not task.holds(walk.meter.columns):
        walk.reach_at_any_rate()
    walk.give_back()
    walk.exchange()
    walk.tidy()
    return walk.meter.columns


class _Walk:
    """The way from the previous plan towards another assignment, change by change.

    A change takes a linear from its start to what is wanted. Linears whose previous option is not
    to be had change in any case, so that for them it is free.
    """

    def __init__(self, task: Task, start: Ints, wanted: Ints, order: Sequence[int]) -> None:
        assert task.previous is not None and task.max_changes is not None
        self._task, self._wanted = task, wanted
        self._order = np.array(order, dtype=np.int64)
        rows = np.arange(len(wanted))
        stays = task.counted & task.allowed[rows, np.where(task.counted, task.previous, 0)]
        self._start: Ints = np.where(stays, task.previous, start)
        self._price: Ints = stays.astype(np.int64)
        self.meter = _Meter(task, self._start)

    @property
    def _left(self) -> int:
        """How many more linears may change that need not."""
        columns, task = self.meter.columns, self._task
        assert task.max_changes is not None
        return task.max_changes - int(task.changed[np.arange(len(columns)), columns].sum())

    def reach(self) -> None:
        """Lower linears in order while floors or the overall least gain are not reached."""
        lower = self._open(self._order, 1)
        steps = [(row, int(self._wanted[row])) for row in lower.tolist()]
        self.meter.fill(steps, self._price, self._left)

    def reach_at_any_rate(self) -> None:
        """Make the changes of largest gain, and take back those that turn out superfluous."""
        columns = most_gain(self._task)
        assert columns is not None, "checked tasks are feasible"
        self.meter = _Meter(self._task, columns)
        for row in reversed(self._order.tolist()):
            if columns[row] != self._start[row] and self.meter.can_move(row, self._start[row]):
                self.meter.move(row, self._start[row])

    def give_back(self) -> list[int]:
        """Raise linears, the last in the order first, while nothing comes to lack by it.

        Returns:
            The rows.
        """
        raised = []
        left = self._left
        higher = self._open(self._order[::-1], -1)
        while left > 0:
            fits = self.meter.fitting(higher, self._wanted[higher])
            if not fits.any():
                break
            # What does not fit now will not fit after another raising either.
            higher = higher[fits.argmax() :]
            row, higher = int(higher[0]), higher[1:]
            self.meter.move(row, int(self._wanted[row]))
            raised.append(row)
            left -= 1
        return raised

    def exchange(self) -> None:
        """Lower linears in order, each for raisings that it makes room for.

        It ends with the first one that nothing comes to need.
        """
        for row in self._open(self._order, 1).tolist():
            before = int(self.meter.columns[row])
            if self._left <= self._price[row]:
                return
            self.meter.move(row, int(self._wanted[row]))
            raised = self.give_back()
            if not raised or self.meter.can_move(row, before):
                for other in raised:
                    self.meter.move(other, int(self._start[other]))
                self.meter.move(row, before)
                return

    def tidy(self) -> None:
        """Make changes that gain nothing and cost nothing."""
        for row in self._open(self._order, 0)[: max(self._left, 0)].tolist():
            self.meter.move(row, int(self._wanted[row]))

    def _open(self, order: Ints, sign: int) -> Ints:
        """Return, in order, the rows that may still change for more (1), equal or less gain."""
        rows = np.arange(len(self._wanted))
        columns, gains = self.meter.columns, self._task.table.overall_row.coefficients
        gained = np.sign(gains[rows, self._wanted] - gains[rows, columns])
        unchanged = (columns == self._start) & (self._wanted != columns)
        which: Mask = unchanged & (gained == sign)
        return order[which[order]]


class _Meter:
    """An assignment with its running gains."""

    def __init__(self, task: Task, start: Ints) -> None:
        self.columns = start.copy()
        self._task = task
        rows = np.arange(len(start))
        overall = task.table.overall_row.coefficients[rows, start]
        self._overall = int(overall.sum())
        self._stages = np.zeros(task.table.num_stages, dtype=np.int64)
        if task.has_floors:
            gains = task.table.stage_row.coefficients[rows, start]
            np.add.at(self._stages, task.table.stage, gains)

    def fill(self, steps: Iterable[tuple[int, int]], price: Ints, limit: int) -> None:
        """Take steps in order, each only where it is still needed, of a total price within limits.

        Args:
            steps: (row, column).
            price: [n], of a step of each row.
            limit: on the sum of prices.
        """
        late = []
        for row, column in steps:
            if not self.stage_lacks(int(self._task.table.stage[row])):
                late.append((row, column))
            elif price[row] <= limit:
                self.move(row, column)
                limit -= int(price[row])
        for row, column in late:
            if not self.overall_lacks():
                break
            if price[row] <= limit:
                self.move(row, column)
                limit -= int(price[row])

    def stage_lacks(self, stage: int) -> bool:
        """Whether a stage is below its floor."""
        if not self._task.has_floors:
            return False
        threshold = self._task.stage_thresholds[stage]
        return threshold is not None and int(self._stages[stage]) < threshold

    def overall_lacks(self) -> bool:
        """Whether the model as a whole is below the least gain."""
        threshold = self._task.overall_threshold
        return threshold is not None and self._overall < threshold

    def can_move(self, row: int, column: int) -> bool:
        """Whether neither the linear's stage nor the model lacks gain after a change."""
        before, stage = int(self.columns[row]), int(self._task.table.stage[row])
        self.move(row, column)
        lacks = self.stage_lacks(stage) or self.overall_lacks()
        self.move(row, before)
        return not lacks

    def fitting(self, rows: Ints, columns: Ints) -> Mask:
        """Return of changes ([r] rows to [r] columns) which could be made, each by itself."""
        task, table = self._task, self._task.table
        fits = np.ones(len(rows), dtype=np.bool_)
        if task.overall_threshold is not None:
            gains = table.overall_row.coefficients
            change = gains[rows, columns] - gains[rows, self.columns[rows]]
            fits &= self._overall + change >= task.overall_threshold
        if task.has_floors:
            gains, stage = table.stage_row.coefficients, table.stage[rows]
            least = np.iinfo(np.int64).min
            floors = np.array([least if t is None else t for t in task.stage_thresholds])
            change = gains[rows, columns] - gains[rows, self.columns[rows]]
            fits &= self._stages[stage] + change >= floors[stage]
        return fits

    def move(self, row: int, column: int) -> None:
        """Change one linear."""
        table, before = self._task.table, self.columns[row]
        overall = table.overall_row.coefficients[row]
        self._overall += int(overall[column] - overall[before])
        if self._task.has_floors:
            gains = table.stage_row.coefficients[row]
            self._stages[int(table.stage[row])] += gains[column] - gains[before]
        self.columns[row] = column


def _least_loss(task: Task, mask: Mask) -> Ints:
    loss = np.where(mask, task.table.quality, np.inf)
    columns: Ints = loss.argmin(axis=1)
    return columns
