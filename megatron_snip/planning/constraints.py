"""Constraints on a plan by name, and the minimization task that they define.

Every constraint has a label, so that an infeasible problem is reported with constraints that
conflict. Feasibility is exact and needs no solver (`option_table.py` defines gains).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_snip.config import PipelineBalance
from megatron_snip.errors import InfeasiblePlanError, UsageError, listing
from megatron_snip.planning.option_table import (
    NOISE,
    Floats,
    Ints,
    Mask,
    OptionTable,
    as_fraction,
)
from megatron_snip.planning.problem import parse_option
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import glob_matches

FORBIDDEN = "forbidden options"
"""Label of the constraint that forbids options whose quality loss is null."""

MOST_SHOWN = 8
"""Of conflicting constraints, in a message."""


class IntegerFloors(NamedTuple):
    """Least sums of integer gains: one sum over all linears, or one sum for each stage.

    Attributes:
        gains: The integer gain of every option, [n, k], int64.
        group: The index of the sum that each linear belongs to, [n].
        least: The least value of each sum.
    """

    gains: Ints
    group: Ints
    least: Ints

    def gains_of(self, columns: Ints) -> Ints:
        """Return each linear's gain [n] under an assignment ([n] columns)."""
        return self.gains[np.arange(len(columns)), columns]

    def missing(self, columns: Ints) -> Ints:
        """Return what each sum lacks under an assignment ([n] columns)."""
        sums = np.bincount(self.group, self.gains_of(columns), len(self.least))
        return self.least - sums.astype(np.int64)  # exact: see `option_table.MAX_SUM`


@dataclass(frozen=True, eq=False)
class Task:
    """Choose one allowed column x_l for each linear l so that the sum of costs is least.

        sum over the linears of group p of gain[l, x_l]  >=  floors[p]

    Attributes:
        table: The problem's arrays; they hold the gains.
        cost: Quality loss plus the price of a change, [n, k]; NaN where forbidden or padded.
        allowed: The columns to choose from, [n, k].
        by_stage: Whether each pipeline stage is a group, or the model is one.
        floors: The least gain of each group, exact.
    """

    table: OptionTable
    cost: Floats
    allowed: Mask
    by_stage: bool
    floors: tuple[Fraction, ...]

    @property
    def members(self) -> tuple[Ints, ...]:
        """Rows of each group."""
        return self.table.members if self.by_stage else (self.table.rows,)

    @cached_property
    def integer_floors(self) -> IntegerFloors:
        """The floors in the solver's integers."""
        table = self.table
        gains = table.integer_gains_by_stage if self.by_stage else table.integer_gains
        pairs = zip(self.floors, gains.units, strict=True)
        return IntegerFloors(
            gains=gains.coefficients,
            group=table.stage if self.by_stage else np.zeros_like(table.stage),
            least=np.array([math.ceil(floor / unit) for floor, unit in pairs]),
        )

    def holds(self, columns: Ints) -> bool:
        """Whether an assignment ([n] columns) satisfies the task (in the solver's integers)."""
        if np.any(columns < 0) or not self.allowed[self.table.rows, columns].all():
            return False
        return bool((self.integer_floors.missing(columns) <= 0).all())

    def cost_of(self, columns: Ints) -> float:
        """Return the cost of an assignment, correctly rounded."""
        return math.fsum(self.cost[self.table.rows, columns])


@dataclass(frozen=True, eq=False)
class Constraints:
    """All constraints on a plan.

    Attributes:
        table: The problem's arrays.
        cost: The cost of every option, [n, k]; see `Task`.
        target: The least efficiency of a plan.
        balance: Whether the target holds for the model or in each stage.
        fixed: Constraints that fix linears to a column, by label. The label is, for example,
            `pin decoder.layers.0.*=fp8`; the value holds each linear's column, [n], and -1 for
            linears that the constraint leaves free.
    """

    table: OptionTable
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
        stages_with_linears = [p for p, rows in enumerate(self.table.members) if len(rows)]
        return {f"{text} in stage {p}": p for p in stages_with_linears}

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all constraints, in the order in which conflicts list them."""
        return (*self.targets, *self.fixed, FORBIDDEN)

    def task(self, active: Iterable[str] | None = None) -> Task:
        """Return the task under the active constraints (by default all)."""
        on = set(self.labels if active is None else active)
        by_stage = self.balance == "stage"
        max_gains = self.table.stage_max_gains if by_stage else (self.table.max_gain,)
        # A target that is a plan's own efficiency must accept that plan, whatever the last digit.
        share = max(Fraction(0), as_fraction(self.target) - NOISE)
        floors = [Fraction(0)] * len(max_gains)
        for label, stage in self.targets.items():
            if label in on:
                group = 0 if stage is None else stage  # the model is the only group
                floors[group] = share * max_gains[group]
        return Task(self.table, self.cost, self._allowed(on), by_stage, tuple(floors))

    def checked_task(self) -> Task:
        """Return the task under all constraints.

        Raises:
            InfeasiblePlanError: if no assignment satisfies all constraints; it names some that
                conflict and the best reachable target.
        """
        task = self.task()
        if assignment_of_most_gain(task) is None:
            raise self._infeasible()
        return task

    def _allowed(self, on: set[str]) -> Mask:
        """Return the columns that the active constraints leave, [n, k]."""
        table = self.table
        if FORBIDDEN in on:
            allowed = table.available
            fixable = ~np.isnan(table.losses)
        else:
            allowed = table.listed
            fixable = np.ones_like(table.listed)
        numbers = np.arange(allowed.shape[1])
        pinned = {label: columns[:, None] == numbers for label, columns in self.fixed.items()}
        # An unlisted bf16 may be pinned, and is otherwise no choice. It stays one without its pin:
        # the deletion filter needs every subset of the constraints to leave at least as much.
        for choice in pinned.values():
            allowed = allowed | (choice & fixable)
        # Pins intersect, so that two options for one linear leave it none: a conflict with labels.
        for label in pinned.keys() & on:
            is_free = (self.fixed[label] < 0)[:, None]
            allowed = allowed & (is_free | pinned[label])
        return allowed

    def _infeasible(self) -> InfeasiblePlanError:
        """Return the error that names a set of conflicting constraints and what can be reached."""
        conflicts = self._conflicting()
        has_option = self._allowed(set(conflicts)).any(axis=1)
        names = [self.table.names[row] for row in np.flatnonzero(~has_option)]
        left = f"; no option is left for {listing(names, 3)}" if names else ""
        texts = [
            f"{label} (null quality_loss{left})" if label == FORBIDDEN else label
            for label in conflicts
        ]
        if len(texts) > MOST_SHOWN:  # a run can have a pin for each linear (`fixed_pins`)
            texts[MOST_SHOWN:] = [f"{len(texts) - MOST_SHOWN} more"]
        best = self._best_target()
        if best is None:
            reachable = "no target can be reached with the other constraints"
        else:
            reachable = f"the best reachable target is {_rounded_down(best)}"
        return InfeasiblePlanError(
            f"no plan satisfies: {'; '.join(texts)}; {reachable}",
            conflicts=conflicts,
            best_target=best,
        )

    def _conflicting(self) -> tuple[str, ...]:
        """Return labels that conflict; without any one of them the others are feasible."""
        conflicts = self.labels
        # A deletion filter: a label without which the others still conflict is dropped for good.
        for label in self.labels:
            rest = tuple(other for other in conflicts if other != label)
            if assignment_of_most_gain(self.task(rest)) is None:
                conflicts = rest
        return conflicts

    def _best_target(self) -> float | None:
        """Return the highest target that the other constraints allow; None if they conflict."""
        without_targets = set(self.labels) - set(self.targets)
        columns = assignment_of_most_gain(self.task(without_targets))
        if columns is None:
            return None
        if self.balance == "stage":
            return min(self.table.stage_efficiencies(columns))
        return self.table.efficiency(columns)


def assignment_of_most_gain(task: Task) -> Ints | None:
    """Return the [n] columns of most gain, at the least cost; None if the task is infeasible."""
    if not task.allowed.any(axis=1).all():
        return None
    # The floors are lower bounds on sums of gains: if the largest gains miss one, all others do.
    columns = columns_of_most_gain(task)
    return columns if task.holds(columns) else None


def columns_of_most_gain(task: Task) -> Ints:
    """Return each linear's allowed column of most gain, and of these the cheapest."""
    return _cheapest_of_most(task, task.table.integer_gains.coefficients)


def columns_of_least_gain(task: Task) -> Ints:
    """Return each linear's allowed column of least gain, and of these the cheapest."""
    return _cheapest_of_most(task, -task.table.integer_gains.coefficients)


def _cheapest_of_most(task: Task, values: Ints) -> Ints:
    """Return each linear's allowed column of the largest value, and of these the cheapest."""
    values = np.where(task.allowed, values, np.iinfo(np.int64).min)
    best = task.allowed & (values == values.max(axis=1, keepdims=True))
    cost = np.nan_to_num(task.cost, nan=0.0)  # a test of feasibility allows forbidden options
    columns: Ints = np.where(best, cost, np.inf).argmin(axis=1)
    return columns


def make_constraints(
    table: OptionTable,
    settings: PlanSettings,
    target: float,
    previous: Ints | None,
    ties: Sequence[Sequence[str]] = (),
) -> Constraints:
    """Turn settings into named constraints and costs.

    Args:
        table: The problem's arrays.
        settings: Pins, balance and the price of a change are used.
        target: The least efficiency of a plan.
        previous: Columns of the previous plan, [n] (-1 where the table has none), or None.
        ties: Groups of linears whose first one stands for all of them in the table (`ties.py`). A
            pin of one of them holds for the group.

    Raises:
        UsageError: if a pin matches no linear, or its option is not available for a linear.
    """
    return Constraints(
        table=table,
        cost=table.losses + settings.change_penalty * changes(table, previous),
        target=target,
        balance=settings.pipeline_balance,
        fixed=dict(_pin(table, ties, glob, option) for glob, option in settings.pins),
    )


def changes(table: OptionTable, previous: Ints | None) -> Floats:
    """Return [n, k], 1 where a column differs from an available option of the previous plan."""
    if previous is None:
        return np.zeros(table.losses.shape)
    # A linear that cannot keep its option changes under every plan: its change has no price. (-1
    # indexes the last column here; the first condition rules that out.)
    is_available = (previous >= 0) & table.available[table.rows, previous]
    differs = np.arange(table.losses.shape[1]) != previous[:, None]
    changed: Floats = (is_available[:, None] & differs).astype(np.float64)
    return changed


def _pin(
    table: OptionTable, ties: Sequence[Sequence[str]], glob: str, option: str
) -> tuple[str, Ints]:
    label = f"pin {glob}={option}"
    group_of = {names[0]: names for names in ties}  # the table has a group's first linear only

    def is_pinned(name: str) -> bool:
        return any(glob_matches(each, glob) for each in group_of.get(name, (name,)))

    matching = np.array([is_pinned(name) for name in table.names])
    if not matching.any():
        example = table.names[0]
        text = f"{label}: no linear's name matches; names look like '{example}'"
        raise UsageError(text, field="pins")
    return label, fixed_columns(table, label, matching, option)


def fixed_columns(table: OptionTable, label: str, rows: Mask, option: str) -> Ints:
    """Fix rows ([n] mask) to an option, for `Constraints.fixed`.

    Raises:
        UsageError: if a row has no such option.
    """
    columns = table.columns_of([str(parse_option(option))] * len(rows))
    without_option = np.flatnonzero(rows & (columns < 0))
    if len(without_option):
        row = int(without_option[0])
        raise UsageError(
            f"{label}: '{option}' is not an option of '{table.names[row]}' "
            f"({', '.join(table.options(row))})"
        )
    return np.where(rows, columns, -1)


def _rounded_down(value: float) -> str:
    """Return a decimal that is not above `value`, so that it can be used as a target."""
    return f"{math.floor(value * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".") or "0"
