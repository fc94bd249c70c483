"""Rules: the user's constraints by name, and what they mean for a table.

Every constraint has a label, so that an infeasible set of them can be reported as those that
already conflict: starting from all, each is dropped in turn and stays dropped if the rest is still
infeasible (deletion filter). Feasibility is decided exactly by `reach.most_gain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np

from megatron_snip.errors import InfeasiblePlanError, UsageError, naming_field
from megatron_snip.options import BF16
from megatron_snip.planning.cost import NOISE, as_fraction
from megatron_snip.planning.problem import canonical
from megatron_snip.planning.reach import best_efficiency, bottleneck_floors, most_gain
from megatron_snip.planning.settings import Balance, PlanSettings
from megatron_snip.planning.table import Ints, Mask, Table
from megatron_snip.planning.task import Task
from megatron_snip.types import split_linear_name

FORBIDDEN = "forbidden options"
"""Label of the constraint that options with a null quality loss are not used."""


@dataclass(frozen=True, eq=False)
class Pin:
    """A constraint that fixes the option of some linears.

    Attributes:
        label: as reported, e.g. `pin decoder.layers.0.*=fp8`.
        columns: [n], the column that each linear is fixed to; -1 where the pin does not apply.
    """

    label: str
    columns: Ints


@dataclass(frozen=True, eq=False)
class Rules:
    """All constraints on a plan.

    Attributes:
        table: what they are about.
        target: least efficiency.
        balance: where it must hold.
        pins: what is fixed.
        previous: [n], columns of the previous plan; None without one.
        max_changes: limit on counted changes; None without one.
    """

    table: Table
    target: float
    balance: Balance
    pins: tuple[Pin, ...] = ()
    previous: Ints | None = None
    max_changes: int | None = None

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Every constraint, by name, in the order in which conflicts list them."""
        if self.balance == "stage":
            used = [p for p, rows in enumerate(self.table.members) if len(rows)]
            labels = [self._stage_label(p) for p in used]
        else:
            labels = [f"target {self.target:g}"]
        if self.max_changes is not None:
            labels.append(f"max-changes {self.max_changes}")
        return (*labels, *(pin.label for pin in self.pins), FORBIDDEN)

    def task(self, active: Iterable[str] | None = None) -> Task:
        """Return the task under the active constraints (all of them by default)."""
        on = set(self.labels if active is None else active)
        table, share = self.table, as_fraction(self.target) - NOISE
        floors = tuple(
            share * weight if self._stage_label(p) in on else None
            for p, weight in enumerate(table.stage_weights)
        )
        limited = f"max-changes {self.max_changes}" in on
        return Task(
            table=table,
            allowed=self._allowed(on),
            floors=floors if self.balance == "stage" else (None,) * table.num_stages,
            least=share * table.weight if f"target {self.target:g}" in on else None,
            previous=self.previous,
            max_changes=self.max_changes if limited else None,
        )

    def checked_task(self) -> Task:
        """Return the task under all constraints, with the bottleneck's floors worked out.

        Raises:
            InfeasiblePlanError: if nothing satisfies all constraints; it names those that
                conflict and the best reachable target.
        """
        task = self.task()
        if most_gain(task) is None:
            raise self._infeasible()
        if self.balance != "bottleneck":
            return task
        floors = bottleneck_floors(task)
        assert floors is not None, "a feasible task has a slowest stage"
        return Task(
            table=task.table,
            allowed=task.allowed,
            floors=floors,
            least=task.least,
            previous=task.previous,
            max_changes=task.max_changes,
        )

    def _stage_label(self, stage: int) -> str:
        return f"target {self.target:g} in stage {stage}" if self.balance == "stage" else ""

    def _allowed(self, on: set[str]) -> Mask:
        table = self.table
        allowed = table.offered if FORBIDDEN in on else table.listed.copy()
        usable = ~np.isnan(table.quality) if FORBIDDEN in on else np.ones_like(allowed)
        untouched = np.ones(len(table.options), dtype=np.bool_)
        for pin in self.pins:
            if pin.label in on:
                rows = np.flatnonzero(pin.columns >= 0)
                wanted = np.zeros_like(allowed)
                wanted[rows, pin.columns[rows]] = usable[rows, pin.columns[rows]]
                # A second pin on a linear leaves what both allow: nothing, if they disagree.
                pinned_before = ~untouched[rows]
                wanted[rows[pinned_before]] &= allowed[rows[pinned_before]]
                allowed[rows] = wanted[rows]
                untouched[rows] = False
        return allowed

    def _infeasible(self) -> InfeasiblePlanError:
        core = self._fewest_conflicting(self.labels)
        best = best_efficiency(self.task(), every_stage=self.balance == "stage")
        reach = (
            "no target can be reached with the other constraints"
            if best is None
            else f"the best reachable target is {_rounded_down(best)}"
        )
        return InfeasiblePlanError(
            f"no plan satisfies: {'; '.join(self._described(core))}; {reach}",
            conflicts=core,
            best_target=best,
        )

    def _fewest_conflicting(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return a subset that is infeasible and of which every member is needed for that."""
        core = list(labels)
        for label in labels:
            rest = [kept for kept in core if kept != label]
            if most_gain(self.task(rest)) is None:
                core = rest
        return tuple(core)

    def _described(self, core: Sequence[str]) -> list[str]:
        """Add to `forbidden options` which linears they leave without any."""
        rows = np.flatnonzero(~self._allowed(set(core)).any(axis=1))
        names = ", ".join(self.table.names[row] for row in rows[:3])
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        left = f"; no option is left for {names}{more}" if len(rows) else ""
        described = f"{FORBIDDEN} (null quality_loss{left})"
        return [described if label == FORBIDDEN else label for label in core]


def make_rules(table: Table, settings: PlanSettings, target: float, previous: Ints | None) -> Rules:
    """Turn settings into named constraints.

    Raises:
        UsageError: if a pin matches no linear or wants an option that is not on offer.
    """
    pins = [_glob_pin(table, glob, option) for glob, option in settings.pins]
    if settings.first_layers is not None:
        pins.append(_edge_pin(table, *settings.first_layers, first=True))
    if settings.last_layers is not None:
        pins.append(_edge_pin(table, *settings.last_layers, first=False))
    unique = {pin.label: pin for pin in pins}
    return Rules(
        table=table,
        target=target,
        balance=settings.pipeline_balance,
        pins=tuple(unique.values()),
        previous=previous,
        max_changes=settings.max_changes if previous is not None else None,
    )


def needs_bf16(settings: PlanSettings) -> bool:
    """Whether some pin asks for bf16, which the problem need not list."""
    edges = [edge for edge in (settings.first_layers, settings.last_layers) if edge is not None]
    asked = [option for _, option in (*settings.pins, *edges)]
    return any(canonical(option) == str(BF16) for option in asked)


def _glob_pin(table: Table, glob: str, option: str) -> Pin:
    rows = [i for i, name in enumerate(table.names) if fnmatchcase(name, glob)]
    label = f"pin {glob}={option}"
    with naming_field("pins"):
        if not rows:
            example = table.names[0]
            raise UsageError(f"{label}: no linear's name matches; names look like '{example}'")
        return _pin(table, label, rows, option)


def _edge_pin(table: Table, count: int, option: str, first: bool) -> Pin:
    """Fix the linears of the first or last `count` layers of every block."""
    side = "first" if first else "last"
    label = f"{side} {count} layers in {option}"
    places = [_layer_of(name, label) for name in table.names]
    layers: dict[str, set[int]] = {}
    for block, layer in places:
        layers.setdefault(block, set()).add(layer)
    edge = {
        (block, layer)
        for block, found in layers.items()
        for layer in (sorted(found)[:count] if first else sorted(found, reverse=True)[:count])
    }
    return _pin(table, label, [i for i, place in enumerate(places) if place in edge], option)


def _layer_of(name: str, label: str) -> tuple[str, int]:
    try:
        block, layer, _ = split_linear_name(name)
    except ValueError as error:
        raise UsageError(f"{label}: {error}") from None
    return block, layer


def _pin(table: Table, label: str, rows: list[int], option: str) -> Pin:
    wanted = canonical(option)
    columns = np.full(len(table.options), -1, dtype=np.int64)
    for row in rows:
        column = table.column_of[row].get(wanted)
        if column is None:
            offered = ", ".join(table.options[row])
            raise UsageError(
                f"{label}: '{option}' is not among the options of '{table.names[row]}' "
                f"({offered}); only bf16 may be pinned without being listed"
            )
        columns[row] = column
    return Pin(label, columns)


def _rounded_down(value: float) -> str:
    """Return a decimal that is not above `value`, so that it can be used as a target."""
    return f"{np.floor(value * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".") or "0"
