"""Constraints on a plan by name, and the minimization task that they define.

Every constraint has a label, so that an infeasible problem is reported with constraints that
conflict. A deletion filter finds them: each label is dropped in turn, and stays dropped if the
rest is still infeasible. Feasibility is exact and needs no solver: it is checked with every linear
at its largest gain (`cost.py` defines gains).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_snip.config import PipelineBalance
from megatron_snip.errors import InfeasiblePlanError, UsageError, listing
from megatron_snip.planning.cost import (
    NOISE,
    CostTable,
    Floats,
    GainRow,
    Ints,
    Mask,
    as_fraction,
)
from megatron_snip.planning.problem import parse_option
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import glob_matches

FORBIDDEN = "forbidden options"
"""Label of the constraint that forbids options whose quality loss is null."""


class Floors(NamedTuple):
    """Least sums of integer gains: of all linears, or of those of each stage.

    Attributes:
        gains: [n, k], int64.
        group: [n], the sum that each linear belongs to.
        least: least value of each sum; 0 where there is none, since gains are never negative.
    """

    gains: Ints
    group: Ints
    least: Ints

    def own(self, columns: Ints) -> Ints:
        """Return each linear's gain [n] under an assignment ([n] columns)."""
        return self.gains[np.arange(len(columns)), columns]

    def missing(self, columns: Ints, rows: Ints | slice = slice(None)) -> Ints:
        """Return what each sum lacks under an assignment ([n] columns), where only `rows` count."""
        sums = np.bincount(self.group[rows], self.own(columns)[rows], len(self.least))
        return self.least - sums.astype(np.int64)  # exact: see `cost.MAX_SUM`


@dataclass(frozen=True, eq=False)
class Task:
    """Choose one allowed column x_l for each linear l so that the sum of costs is least.

        sum over stage p of gain[l, x_l]  >=  floors[p]     where the stages have floors
        sum over all linears of gain      >=  least         where there is an overall floor

    Attributes:
        table: the gains.
        cost: [n, k], quality loss plus the price of a change; NaN where forbidden or padded.
        allowed: [n, k], the columns to choose from.
        floors: least gain of each stage, exact; None if the stages have none.
        least: least overall gain, exact; None where there is none.
    """

    table: CostTable
    cost: Floats
    allowed: Mask
    floors: tuple[Fraction, ...] | None
    least: Fraction | None

    @cached_property
    def gain_floors(self) -> tuple[Floors, ...]:
        """Both kinds of floors in the solver's integers: those of the stages, then the overall."""
        table, least = self.table, self.least or Fraction(0)
        overall = _integer_floors(table.overall_row, np.zeros_like(table.stage), (least,))
        if self.floors is None:
            return (overall,)
        return _integer_floors(table.stage_row, table.stage, self.floors), overall

    def holds(self, columns: Ints) -> bool:
        """Whether an assignment ([n] columns) satisfies the task (in the solver's integers)."""
        if np.any(columns < 0) or not self.allowed[self.table.rows, columns].all():
            return False
        return all((floors.missing(columns) <= 0).all() for floors in self.gain_floors)

    def cost_of(self, columns: Ints) -> float:
        """Return the cost of an assignment, correctly rounded."""
        return math.fsum(self.cost[self.table.rows, columns])


@dataclass(frozen=True, eq=False)
class Constraints:
    """All constraints on a plan.

    Attributes:
        table: the problem's arrays.
        cost: [n, k]; see `Task`.
        target: least efficiency.
        balance: whether the target holds for the model or in each stage.
        fixed: by label (`pin decoder.layers.0.*=fp8`) the column that each linear is fixed to, [n];
            -1 for linears that the constraint leaves free.
    """

    table: CostTable
    cost: Floats
    target: float
    balance: PipelineBalance
    fixed: Mapping[str, Ints]

    @cached_property
    def targets(self) -> dict[str, int | None]:
        """Stage of each target, by label; None for the target of the model."""
        text = f"target {self.target:g}"
        if self.balance != "stage":
            return {text: None}
        used = [p for p, rows in enumerate(self.table.members) if len(rows)]
        return {f"{text} in stage {p}": p for p in used}

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all constraints, in the order in which conflicts list them."""
        return (*self.targets, *self.fixed, FORBIDDEN)

    def task(self, active: Iterable[str] | None = None) -> Task:
        """Return the task under the active constraints (by default all)."""
        on = set(self.labels if active is None else active)
        share = as_fraction(self.target) - NOISE
        floors, least = [Fraction(0)] * self.table.problem.num_stages, None
        for label, stage in self.targets.items():
            if label not in on:
                continue
            if stage is None:
                least = share * self.table.weight
            else:
                floors[stage] = share * self.table.stage_weights[stage]
        by_stage = tuple(floors) if self.balance == "stage" else None
        return Task(self.table, self.cost, self._allowed(on), by_stage, least)

    def checked_task(self) -> Task:
        """Return the task under all constraints, with floors that keep the bottleneck fast.

        Raises:
            InfeasiblePlanError: if no assignment satisfies all constraints; it names some that
                conflict and the best reachable target.
        """
        task = self.task()
        columns = max_saving_assignment(task)
        if columns is None:
            raise self._infeasible()
        if self.balance != "bottleneck":
            return task
        # T* is the least time of the slowest stage; base time b needs gain >= (b - T*) / rate.
        bases, rate = self.table.stage_bases, self.table.rate
        times = map(lambda b, g: b - rate * g, bases, self.table.stage_gains(columns))
        slowest = max(times) * (1 + NOISE)
        return replace(task, floors=tuple((base - slowest) / rate for base in bases))

    def _allowed(self, on: set[str]) -> Mask:
        table = self.table
        allowed, fixable = table.listed, np.ones_like(table.listed)
        if FORBIDDEN in on:
            allowed, fixable = table.available, ~np.isnan(table.quality)
        active = [columns[:, None] for label, columns in self.fixed.items() if label in on]
        is_fixed = np.any([columns >= 0 for columns in active], axis=0)
        allowed = np.where(is_fixed, fixable, allowed)  # an unlisted bf16 may be pinned
        for columns in active:  # two options for a linear leave none
            allowed &= (columns < 0) | (columns == np.arange(allowed.shape[1]))
        return allowed

    def _infeasible(self) -> InfeasiblePlanError:
        core = self._conflicting()
        names = [self.table.names[r] for r in np.flatnonzero(~self._allowed(set(core)).any(axis=1))]
        left = f"; no option is left for {listing(names, 3)}" if names else ""
        texts = [f"{c} (null quality_loss{left})" if c == FORBIDDEN else c for c in core]
        best, reachable = self._best_target(), "no target can be reached with the other constraints"
        if best is not None:
            reachable = f"the best reachable target is {_rounded_down(best)}"
        return InfeasiblePlanError(
            f"no plan satisfies: {'; '.join(texts)}; {reachable}", conflicts=core, best_target=best
        )

    def _conflicting(self) -> tuple[str, ...]:
        """Return labels that conflict; without any one of them the others are feasible."""
        core = self.labels
        for label in self.labels:
            rest = tuple(other for other in core if other != label)
            if max_saving_assignment(self.task(rest)) is None:
                core = rest
        return core

    def _best_target(self) -> float | None:
        """Return the highest target that the other constraints allow; None if they conflict."""
        columns = max_saving_assignment(self.task(set(self.labels) - set(self.targets)))
        if columns is None:
            return None
        if self.balance == "stage":
            return min(self.table.stage_efficiencies(columns))
        return self.table.efficiency(columns)


def max_saving_assignment(task: Task) -> Ints | None:
    """Return the [n] columns of largest gain, at the least cost; None if the task is infeasible."""
    if not task.allowed.any(axis=1).all():
        return None
    columns = by_saving(task, most=True)
    return columns if task.holds(columns) else None


def by_saving(task: Task, most: bool) -> Ints:
    """Return, by row, the allowed column of most (else least) gain; of these the cheapest."""
    gains = task.table.overall_row.coefficients * (1 if most else -1)
    gains = np.where(task.allowed, gains, np.iinfo(np.int64).min)
    best = task.allowed & (gains == gains.max(axis=1, keepdims=True))
    columns: Ints = np.where(best, np.nan_to_num(task.cost, nan=0.0), np.inf).argmin(axis=1)
    return columns


def make_constraints(
    table: CostTable, settings: PlanSettings, target: float, previous: Ints | None
) -> Constraints:
    """Turn settings into named constraints and costs.

    Args:
        table: the problem's arrays.
        settings: pins, balance and the price of a change.
        target: least efficiency.
        previous: [n], columns of the previous plan (-1 where the table has none), or None.

    Raises:
        UsageError: if a pin matches no linear, or its option is not available for a linear.
    """
    fixed = dict(_pin(table, glob, option) for glob, option in settings.pins)
    cost = table.quality + settings.change_penalty * changes(table, previous)
    return Constraints(table, cost, target, settings.pipeline_balance, fixed)


def changes(table: CostTable, previous: Ints | None) -> Floats:
    """Return [n, k], 1 where a column differs from an available option of the previous plan."""
    if previous is None:
        return np.zeros(table.quality.shape)
    available = (previous >= 0) & table.available[table.rows, previous]
    differs = np.arange(table.quality.shape[1]) != previous[:, None]
    changed: Floats = (available[:, None] & differs).astype(np.float64)
    return changed


def _integer_floors(row: GainRow, group: Ints, least: Sequence[Fraction]) -> Floors:
    # Gains are never negative. A floor far below 0 would not fit the solver's integers.
    integers = [max(0, math.ceil(g / unit)) for g, unit in zip(least, row.units, strict=True)]
    return Floors(row.coefficients, group, np.array(integers))


def _pin(table: CostTable, glob: str, option: str) -> tuple[str, Ints]:
    label = f"pin {glob}={option}"
    matching = np.array([glob_matches(name, glob) for name in table.names])
    if not matching.any():
        example = table.names[0]
        text = f"{label}: no linear's name matches; names look like '{example}'"
        raise UsageError(text, field="pins")
    return label, fixed_columns(table, label, matching, option)


def fixed_columns(table: CostTable, label: str, rows: Mask, option: str) -> Ints:
    """Fix rows ([n] mask) to an option, for `Constraints.fixed`.

    Raises:
        UsageError: if a row has no such option.
    """
    columns = table.columns_of([str(parse_option(option))] * len(rows))
    for row in np.flatnonzero(rows & (columns < 0)).tolist():
        raise UsageError(
            f"{label}: '{option}' is not an option of '{table.names[row]}' "
            f"({', '.join(table.options(row))})"
        )
    return np.where(rows, columns, -1)


def _rounded_down(value: float) -> str:
    """Return a decimal that is not above `value`, so that it can be used as a target."""
    return f"{math.floor(value * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".") or "0"
