"""Find the best assignment of a task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.cpsat import Core, CoreRow, Effort, choice_table, solve_core
from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.table import Ints
from megatron_snip.planning.task import Task


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment and what is known about it.

    Attributes:
        columns: [n], the chosen column of each linear.
        optimal: whether no better assignment exists, up to `error`.
        bound: lower bound on the quality loss of every assignment of the task.
        error: bound on what integer scaling may have cost, in units of quality loss.
    """

    columns: Ints
    optimal: bool
    bound: float
    error: float


def solve(task: Task, settings: PlanSettings, hint: Ints | None, deadline: Deadline) -> Solution:
    """Minimize the quality loss."""
    start = most_gain(task)
    assert start is not None, "checked tasks are feasible"
    if hint is not None and task.holds(hint):
        start = hint
    rows, columns, starts = choice_table(task.allowed)
    where = np.full(task.allowed.shape, -1)
    where[rows, columns] = np.arange(len(rows))
    n = len(start)
    lines = []
    if task.overall_threshold is not None:
        lines.append(
            CoreRow(task.table.overall_row.coefficients[rows, columns], task.overall_threshold)
        )
    for p, threshold in enumerate(task.stage_thresholds if task.has_floors else ()):
        if threshold is not None:
            gains = np.where(
                task.table.stage[rows] == p, task.table.stage_row.coefficients[rows, columns], 0
            )
            lines.append(CoreRow(gains, threshold))
    if task.max_changes is not None:
        lines.append(CoreRow(-task.changed[rows, columns], -task.max_changes))
    core = Core(
        np.asarray(starts),
        task.table.quality[rows, columns],
        tuple(lines),
        where[np.arange(n), start],
    )
    effort = Effort(deadline.left(), 1e9, settings.workers, settings.seed)
    answer = solve_core(core, effort)
    chosen = start if answer.choices is None else columns[answer.choices]
    return Solution(chosen, answer.proven, answer.bound, answer.error)
