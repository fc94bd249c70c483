"""Menu: a task's choices and constraints as plain arrays, without choices that nobody needs.

A choice is dropped if another one of the same linear is at least as good in every respect (loss,
gain, change) and comes first or is better in one of them.

Constraints are lines: sums of integers over some linears that must reach a threshold. The first
ones are the stages' floors, one each; the last `num_common` ones span all linears (overall gain,
changes). Where there are floors and no common lines, the menu falls apart into one a stage.
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
    """A constraint: sum over i of coefficients[i, x of members[i]] >= threshold.

    Attributes:
        members: [s], positions in the menu.
        coefficients: [s, k], int64.
        threshold: least sum.
    """

    members: Ints
    coefficients: Ints
    threshold: int

    def sum(self, columns: Ints) -> int:
        """Return the sum under an assignment of the menu ([m] columns)."""
        return int(self.coefficients[np.arange(len(self.members)), columns[self.members]].sum())


@dataclass(frozen=True, eq=False)
class Menu:
    """The choices of some linears and the constraints on them.

    Attributes:
        linears: [m], their positions in what the menu was cut from.
        cost: [m, k], to be minimized; inf where there is no choice.
        lines: all constraints, in integers: floors, then common ones.
        num_common: how many of the last lines span all linears.
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
    num_common: int
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

    @property
    def floor_lines(self) -> tuple[Line, ...]:
        """The stages' floors."""
        return self.lines[: len(self.lines) - self.num_common]

    @property
    def common_lines(self) -> tuple[Line, ...]:
        """Overall gain, if there is a least one, then changes, if they are limited."""
        return self.lines[len(self.lines) - self.num_common :]

    def loss(self, columns: Ints) -> float:
        """Return the cost of an assignment ([m] columns)."""
        return math.fsum(self.cost[self.positions, columns])

    def holds(self, columns: Ints) -> bool:
        """Whether an assignment uses choices of the menu only and keeps to every constraint."""
        if not np.isfinite(self.cost[self.positions, columns]).all():
            return False
        return all(line.sum(columns) >= line.threshold for line in self.lines)

    def without_superfluous(self, columns: Ints) -> Ints:
        """Replace choices that are not in the menu by ones that are as good in every respect.

        Where there is none the result does not hold.
        """
        gone = ~np.isfinite(self.cost[self.positions, columns])
        suits = np.isfinite(self.cost)
        for line in self.lines:
            own = line.coefficients[np.arange(len(line.members)), columns[line.members]]
            suits[line.members] &= line.coefficients >= own[:, None]
        best: Ints = np.where(suits, self.cost, np.inf).argmin(axis=1)
        return np.where(gone, best, columns)


def make_menu(task: Task) -> Menu:
    """Return the menu of a task."""
    table = task.table
    everyone = np.arange(len(table.options))
    overall = table.overall_row.coefficients
    gain, floors, lines = overall.astype(np.float64), [-math.inf] * table.num_stages, []
    if task.has_floors:
        reference = table.overall_row.scales[0].unit
        units = [float(scale.unit / reference) for scale in table.stage_row.scales]
        gain = table.stage_row.coefficients * np.array(units)[table.stage][:, None]
        for p, members in enumerate(table.members):
            threshold = task.stage_thresholds[p]
            if threshold is not None and len(members):
                lines.append(Line(members, table.stage_row.coefficients[members], threshold))
                floors[p] = threshold * units[p]
    common = []
    least = None if _overall_follows(task) else task.overall_threshold
    if least is not None:
        common.append(Line(everyone, overall, least))
    if task.max_changes is not None:
        common.append(Line(everyone, -task.changed, -task.max_changes))
    keep = task.allowed & ~_dominated(task)
    return Menu(
        linears=everyone,
        cost=np.where(keep, table.quality, np.inf),
        lines=(*lines, *common),
        num_common=len(common),
        gain=gain,
        changed=task.changed.astype(np.float64),
        stage=table.stage,
        floors=np.array(floors),
        least=-math.inf if least is None else float(least),
        max_changes=math.inf if task.max_changes is None else float(task.max_changes),
    )


def stage_menus(menu: Menu) -> list[Menu]:
    """Cut a menu with floors into one a stage, each with its floor for its only line."""
    return [
        Menu(
            linears=line.members,
            cost=menu.cost[line.members],
            lines=(Line(np.arange(len(line.members)), line.coefficients, line.threshold),),
            num_common=1,
            gain=line.coefficients.astype(np.float64),
            changed=np.zeros(line.coefficients.shape),
            stage=np.zeros(len(line.members), dtype=np.int64),
            floors=np.array([-math.inf]),
            least=float(line.threshold),
            max_changes=math.inf,
        )
        for line in menu.floor_lines
    ]


def _overall_follows(task: Task) -> bool:
    """Whether the stages' floors already imply the overall least gain."""
    if task.least is None or not task.has_floors:
        return task.least is None
    return sum(floor for floor in task.floors if floor is not None) >= task.least


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
