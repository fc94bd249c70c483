"""Budget arithmetic that all baselines share.

A baseline is an order of linears. From a start where every linear is at its gentlest option, the
linears are lowered in that order until the floors and the overall least gain are reached, so the
target is overshot by at most one linear (per stage, where stages have floors).

With a limit on changes, the assignment so found is approached from the previous plan: lowerings in
the policy's order first, each followed by the raisings that it makes room for, until the limit.
Where the order cannot reach the target within the limit, the changes of largest gain are made.
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
    late = []
    for row, column in steps:
        if meter.stage_lacks(int(task.table.stage[row])):
            meter.move(row, column)
        else:
            late.append((row, column))
    for row, column in late:
        if not meter.overall_lacks():
            break
        meter.move(row, column)
    return meter.columns


def within_changes(task: Task, wanted: Ints, order: Sequence[int]) -> Ints:
    """Go from the previous plan towards `wanted`, as far as `max_changes` allows.

    Args:
        task: whose rules are kept.
        wanted: [n], what the policy would choose without the limit.
        order: rows in the policy's order, the first to be lowered first.

    Returns:
        [n] columns that keep to every rule.
    """
    rows = np.arange(len(wanted))
    if task.max_changes is None or task.previous is None or task.holds(wanted):
        return wanted
    stays = task.counted & task.allowed[rows, np.where(task.counted, task.previous, 0)]
    columns = np.where(stays, task.previous, wanted)
    gains = task.table.overall_row.coefficients
    lower = [r for r in order if stays[r] and gains[r, wanted[r]] > gains[r, columns[r]]]
    higher = [r for r in reversed(order) if stays[r] and wanted[r] != columns[r]]
    higher = [r for r in higher if gains[r, wanted[r]] <= gains[r, columns[r]]]
    left = task.max_changes - int(task.changed[rows, columns].sum())
    meter = _Meter(task, columns)
    for row in lower[: max(left, 0)]:
        if left <= 0:
            break
        meter.move(row, int(wanted[row]))
        left -= 1
        raised = next((r for r in higher if meter.can_move(r, int(wanted[r]))), None)
        if raised is not None and left > 0:
            meter.move(raised, int(wanted[raised]))
            higher.remove(raised)
            left -= 1
    if task.holds(meter.columns):
        return meter.columns
    fallback = most_gain(task)
    assert fallback is not None, "checked tasks are feasible"
    return fallback


class _Meter:
    """An assignment with its running gains."""

    def __init__(self, task: Task, start: Ints) -> None:
        self.columns = start.copy()
        self._task = task
        rows = np.arange(len(start))
        overall = task.table.overall_row.coefficients[rows, start]
        self._overall = int(overall.sum())
        self._stages = [0] * task.table.num_stages
        if task.has_floors:
            gains = task.table.stage_row.coefficients[rows, start]
            self._stages = [int(gains[members].sum()) for members in task.table.members]

    def stage_lacks(self, stage: int) -> bool:
        """Whether a stage is below its floor."""
        if not self._task.has_floors:
            return False
        threshold = self._task.stage_thresholds[stage]
        return threshold is not None and self._stages[stage] < threshold

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

    def move(self, row: int, column: int) -> None:
        """Change one linear."""
        table, before = self._task.table, self.columns[row]
        overall = table.overall_row.coefficients[row]
        self._overall += int(overall[column] - overall[before])
        if self._task.has_floors:
            gains = table.stage_row.coefficients[row]
            self._stages[int(table.stage[row])] += int(gains[column] - gains[before])
        self.columns[row] = column


def _least_loss(task: Task, mask: Mask) -> Ints:
    loss = np.where(mask, task.table.quality, np.inf)
    columns: Ints = loss.argmin(axis=1)
    return columns
