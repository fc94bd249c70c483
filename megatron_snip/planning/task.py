"""Task: the decision with every rule resolved into masks and numbers.

Choose one allowed column x_l for each linear l so that the sum of quality losses is least and

    sum over stage p of gain[l, x_l]  >=  floors[p]       where the stage has a floor
    sum over all linears of gain      >=  least           where there is an overall least gain
    #{l counted : x_l != previous[l]} <=  max_changes     where changes are limited

A linear is counted if its previous option is still listed; one whose option left the table has
to change and does not use up the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_snip.planning.table import Ints, Mask, Table


@dataclass(frozen=True, eq=False)
class Task:
    """See the file's description.

    Attributes:
        table: the numbers.
        allowed: [n, k], what may be chosen (pins and forbidden options resolved).
        floors: least gain of each stage, exact; None where the stage has none.
        least: least overall gain, exact; None where there is none.
        previous: [n], previous column, -1 where unknown; None without a previous plan.
        max_changes: limit on counted changes; None without one.
    """

    table: Table
    allowed: Mask
    floors: tuple[Fraction | None, ...]
    least: Fraction | None
    previous: Ints | None = None
    max_changes: int | None = None

    @cached_property
    def has_floors(self) -> bool:
        """Whether any stage has a floor."""
        return any(floor is not None for floor in self.floors)

    @cached_property
    def stage_thresholds(self) -> tuple[int | None, ...]:
        """Floors in the units of `table.stage_row`."""
        scales = self.table.stage_row.scales
        return tuple(
            None if floor is None else scale.threshold(floor)
            for floor, scale in zip(self.floors, scales, strict=True)
        )

    @cached_property
    def overall_threshold(self) -> int | None:
        """`least` in the units of `table.overall_row`."""
        if self.least is None:
            return None
        return self.table.overall_row.scales[0].threshold(self.least)

    @cached_property
    def counted(self) -> Mask:
        """[n], linears whose change counts against `max_changes`."""
        if self.previous is None:
            return np.zeros(len(self.table.options), dtype=np.bool_)
        rows = np.arange(len(self.previous))
        known = self.previous >= 0
        counted: Mask = known & self.table.listed[rows, np.where(known, self.previous, 0)]
        return counted

    @cached_property
    def changed(self) -> NDArray[np.int64]:
        """[n, k], 1 where choosing the column is a counted change."""
        flags = np.zeros(self.allowed.shape, dtype=np.int64)
        if self.previous is not None and self.max_changes is not None:
            flags[self.counted] = 1
            rows = np.flatnonzero(self.counted)
            flags[rows, self.previous[rows]] = 0
        return flags

    def holds(self, columns: Ints) -> bool:
        """Whether an assignment keeps to every rule of the task (in the integers of the model)."""
        rows = np.arange(len(columns))
        if np.any(columns < 0) or not self.allowed[rows, columns].all():
            return False
        if self.max_changes is not None and self.changed[rows, columns].sum() > self.max_changes:
            return False
        if self.has_floors:
            gains = self.table.stage_row.coefficients[rows, columns]
            for members, threshold in zip(self.table.members, self.stage_thresholds, strict=True):
                if threshold is not None and int(gains[members].sum()) < threshold:
                    return False
        if self.overall_threshold is None:
            return True
        gained = int(self.table.overall_row.coefficients[rows, columns].sum())
        return gained >= self.overall_threshold
