"""Menu: a task's choices as plain arrays, without those that no best plan needs.

A choice is dropped if another one of the same linear is at least as good in every respect (loss,
gain, change) and comes first or is better in one of them.

Where the rows of a task do not couple the stages, the task falls apart into one menu a stage, and
each is solved alone: the bound is as tight as the sum of theirs, and the work grows linearly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_snip.planning.table import Floats, Ints, Mask
from megatron_snip.planning.task import Task


@dataclass(frozen=True, eq=False)
class Line:
    """A constraint: the sum over linears of coefficients[l, x_l] is at least `threshold`."""

    coefficients: Ints
    threshold: int


@dataclass(frozen=True, eq=False)
class Menu:
    """The choices of some linears of a task and the constraints on them.

    Attributes:
        linears: [m], their rows in the task's table.
        cost: [m, k], quality loss; inf where there is no choice.
        lines: all constraints, in integers.
        gain: [m, k], as doubles in one unit for all linears.
        changed: [m, k], 1.0 where the choice is a counted change.
        stage: [m].
        floors: [p], least gain of each stage in units of `gain`; -inf without one.
        least: least gain of all, in units of `gain`; -inf without one.
        max_changes: inf without a limit.
    """

    linears: Ints
    cost: Floats
    lines: tuple[Line, ...]
    gain: Floats
    changed: Floats
    stage: Ints
    floors: Floats
    least: float
    max_changes: float

    @cached_property
    def positions(self) -> Ints:
        """0 .. m-1, to index arrays by linear."""
        return np.arange(len(self.linears))

    def loss(self, columns: Ints) -> float:
        """Return the sum of quality losses of an assignment ([m] columns)."""
        return math.fsum(self.cost[self.positions, columns])

    def holds(self, columns: Ints) -> bool:
        """Whether an assignment keeps to every constraint."""
        if not np.isfinite(self.cost[self.positions, columns]).all():
            return False
        sums = (int(line.coefficients[self.positions, columns].sum()) for line in self.lines)
        return all(s >= line.threshold for s, line in zip(sums, self.lines, strict=True))

    def without_superfluous(self, columns: Ints) -> Ints:
        """Replace choices that are not in the menu by ones that are as good in every respect."""
        gone = np.flatnonzero(~np.isfinite(self.cost[self.positions, columns]))
        suits = np.isfinite(self.cost[gone])
        for line in self.lines:
            mine = line.coefficients[gone]
            suits &= mine >= mine[np.arange(len(gone)), columns[gone]][:, None]
        replaced = columns.copy()
        replaced[gone] = np.where(suits, self.cost[gone], np.inf).argmin(axis=1)
        return replaced


def make_menus(task: Task) -> list[Menu]:
    """Return the menus that a task falls into: one a stage if nothing couples stages, else one."""
    keep = task.allowed & ~_dominated(task)
    if not _stages_are_independent(task):
        return [_coupled_menu(task, keep)]
    return [_stage_menu(task, keep, p) for p, rows in enumerate(task.table.members) if len(rows)]


def _stages_are_independent(task: Task) -> bool:
    """Whether floors are all there is: no limit on changes, and the overall least gain follows."""
    floors = [f for f, rows in zip(task.floors, task.table.members, strict=True) if len(rows)]
    known = [floor for floor in floors if floor is not None]
    if task.max_changes is not None or len(known) < len(floors):
        return False
    return task.least is None or sum(known) >= task.least


def _stage_menu(task: Task, keep: Mask, stage: int) -> Menu:
    rows = task.table.members[stage]
    coefficients = task.table.stage_row.coefficients[rows]
    threshold = task.stage_thresholds[stage]
    assert threshold is not None
    return Menu(
        linears=rows,
        cost=np.where(keep, task.table.quality, np.inf)[rows],
        lines=(Line(coefficients, threshold),),
        gain=coefficients.astype(np.float64),
        changed=np.zeros(coefficients.shape),
        stage=np.zeros(len(rows), dtype=np.int64),
        floors=np.array([-math.inf]),
        least=float(threshold),
        max_changes=math.inf,
    )


def _coupled_menu(task: Task, keep: Mask) -> Menu:
    table = task.table
    gain, floors = table.overall_row.coefficients.astype(np.float64), [-math.inf] * table.num_stages
    lines = []
    if task.has_floors:
        reference = table.overall_row.scales[0].unit
        units = [float(scale.unit / reference) for scale in table.stage_row.scales]
        gain = table.stage_row.coefficients * np.array(units)[table.stage][:, None]
        for p, threshold in enumerate(task.stage_thresholds):
            if threshold is not None:
                mine = (table.stage == p)[:, None]
                lines.append(Line(np.where(mine, table.stage_row.coefficients, 0), threshold))
                floors[p] = threshold * units[p]
    least = task.overall_threshold
    if least is not None:
        lines.append(Line(table.overall_row.coefficients, least))
    if task.max_changes is not None:
        lines.append(Line(-task.changed, -task.max_changes))
    return Menu(
        linears=np.arange(len(table.options)),
        cost=np.where(keep, table.quality, np.inf),
        lines=tuple(lines),
        gain=gain,
        changed=task.changed.astype(np.float64),
        stage=table.stage,
        floors=np.array(floors),
        least=-math.inf if least is None else float(least),
        max_changes=math.inf if task.max_changes is None else float(task.max_changes),
    )


def _dominated(task: Task) -> Mask:
    """[n, k], choices that another one makes superfluous."""
    cost = np.where(task.allowed, task.table.quality, np.inf)
    minus = np.iinfo(np.int64).min
    respects = [-cost, np.where(task.allowed, task.table.overall_row.coefficients, minus)]
    if task.has_floors:
        respects.append(np.where(task.allowed, task.table.stage_row.coefficients, minus))
    respects.append(-task.changed)
    dominated = np.zeros(task.allowed.shape, dtype=np.bool_)
    for j in range(cost.shape[1]):
        # Does j, which is allowed, make others superfluous? On a tie the earlier column stays.
        as_good = np.ones_like(dominated)
        better = np.zeros_like(dominated)
        for values in respects:
            as_good &= values[:, [j]] >= values
            better |= values[:, [j]] > values
        better[:, j + 1 :] = True
        dominated |= as_good & better & task.allowed[:, [j]]
    return dominated
