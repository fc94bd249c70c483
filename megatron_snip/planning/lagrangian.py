"""A task's choice sets, and their Lagrangian dual: a bound and assignments close to the optimum.

A choice is dominated if another choice of the same linear costs no more and gains no less. A choice
set has no dominated choices, and one floor: the sum of its linears' gains must reach it. A task is
one choice set, or one for each pipeline stage where every stage has a floor of its own.

With a price on the gain the linears are independent, and each takes its cheapest choice:

    L(price) = sum_l min_j [ cost[l, j] - price gain[l, j] ] + price floor,    price >= 0

L never exceeds the optimum, and its maximum equals the bound of the linear relaxation. L is the
lower envelope of lines, one per assignment, so secants find the maximum exactly, after about ten
steps. Numbers are doubles; the bound has an allowance for rounding errors and is safe.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_snip.planning.constraints import Task
from megatron_snip.planning.option_table import Floats, Ints, Mask

_MAX_SECANTS = 200  # finitely many are enough in exact numbers; this ends a cycle by rounding
_ROUNDING = 16 * np.finfo(np.float64).eps


@dataclass(frozen=True, eq=False)
class ChoiceSet:
    """The choices of m linears, and the floor of their gains.

    Attributes:
        linears: Rows of the linears in the table, [m].
        cost: The cost to be minimized, [m, k]; inf for dropped choices.
        gains: The gains in the solver's integers, [m, k].
        floor: The least sum of gains.
    """

    linears: Ints
    cost: Floats
    gains: Ints
    floor: int

    @cached_property
    def rows(self) -> Ints:
        """0 .. m-1, for indexing one column per linear."""
        return np.arange(len(self.linears))

    def cost_of(self, columns: Ints) -> float:
        """Return the cost of an assignment ([m] columns)."""
        return math.fsum(self.cost[self.rows, columns])

    def gains_of(self, columns: Ints) -> Ints:
        """Return each linear's gain [m] under an assignment ([m] columns)."""
        gains: Ints = self.gains[self.rows, columns]
        return gains

    def missing(self, columns: Ints, rows: Ints | slice = slice(None)) -> int:
        """Return what the floor lacks under an assignment, where only `rows` count."""
        return self.floor - int(self.gains_of(columns)[rows].sum())

    def holds(self, columns: Ints) -> bool:
        """Whether an assignment uses no dropped choice and reaches the floor."""
        uses_dropped = not np.isfinite(self.cost[self.rows, columns]).all()
        return not uses_dropped and self.missing(columns) <= 0

    def without_unusable(self, columns: Ints) -> Ints:
        """Replace dropped choices by the cheapest ones with as much gain, where there is one."""
        dropped = ~np.isfinite(self.cost[self.rows, columns])
        # argmin of a row without one (all inf) is column 0; the caller asks `holds`.
        suits = np.isfinite(self.cost) & (self.gains >= self.gains_of(columns)[:, None])
        best: Ints = np.where(suits, self.cost, np.inf).argmin(axis=1)
        return np.where(dropped, best, columns)


def make_choices(task: Task) -> list[ChoiceSet]:
    """Return the choice sets of a task: one for each floor."""
    cost = np.where(task.allowed & ~_dominated(task), task.cost, np.inf)
    floors = task.integer_floors
    return [
        ChoiceSet(rows, cost[rows], floors.gains[rows], int(least))
        for rows, least in zip(task.members, floors.least, strict=True)
        if len(rows)
    ]


def _dominated(task: Task) -> Mask:
    """Return the choices [n, k] that another one of the linear makes superfluous."""
    # In both criteria a larger value is better.
    criteria = (
        -np.where(task.allowed, task.cost, np.inf),
        np.where(task.allowed, task.integer_floors.gains, np.iinfo(np.int64).min),
    )
    dominated = np.zeros(task.allowed.shape, dtype=np.bool_)
    for j in range(task.allowed.shape[1]):
        as_good = np.ones_like(dominated)
        better = np.zeros_like(dominated)
        for values in criteria:
            as_good &= values[:, [j]] >= values
            better |= values[:, [j]] > values
        better[:, j + 1 :] = True  # of equal choices the first one stays
        dominated |= as_good & better & task.allowed[:, [j]]
    return dominated


@dataclass(frozen=True, eq=False)
class Dual:
    """The dual's maximum.

    Attributes:
        bound: A safe lower bound on the cost of any assignment.
        reduced: How much the bound grows if the choice is forced, [m, k]; inf for dropped choices.
        below: Columns of least cost at the price, [m]. Where columns tie, the ones of too little
            gain.
        above: Columns of least cost at the price, [m]. Where columns tie, the ones of enough gain.
    """

    bound: float
    reduced: Floats
    below: Ints
    above: Ints


def maximize(choices: ChoiceSet) -> Dual:
    """Return the dual's maximum.

    Args:
        choices: The choice set of a feasible task.
    """
    price, below, above = _best_price(choices)
    paid = price * choices.gains
    value = choices.cost - paid
    best = value.min(axis=1)
    terms = [*best.tolist(), price * choices.floor]

    # The allowance for rounding is in proportion to all numbers that were added.
    chosen = (choices.rows, value.argmin(axis=1))
    size = np.abs(choices.cost[chosen]).sum() + np.abs(paid[chosen]).sum()
    size += math.fsum(map(abs, terms))
    bound = math.fsum(terms) - _ROUNDING * float(size)
    return Dual(bound, value - best[:, None], below, above)


def _best_price(choices: ChoiceSet) -> tuple[float, Ints, Ints]:
    """Return the price of the dual's maximum, and assignments below and above the floor."""
    # The ends between which the price lies: the columns of least cost (then most gain), at price 0,
    # and of most gain (then least cost), at a price without limit.
    cost = choices.cost
    gain = np.where(np.isfinite(cost), choices.gains.astype(np.float64), -np.inf)
    cheap = np.where(cost == cost.min(axis=1, keepdims=True), gain, -np.inf)
    rich = np.where(gain == gain.max(axis=1, keepdims=True), cost, np.inf)
    below = cheap.argmax(axis=1)
    above = rich.argmin(axis=1)
    low_cost, low_gain = _line(choices, below)
    if low_gain >= choices.floor:  # the cheapest assignment needs no price
        return 0.0, below, below
    high_cost, high_gain = _line(choices, above)
    price = 0.0
    for _ in range(_MAX_SECANTS):
        if high_gain <= low_gain:
            break
        # The maximum lies between a line that rises with the price (it misses the floor) and one
        # that falls. Where they cross is the next price.
        price = max(0.0, (high_cost - low_cost) / (high_gain - low_gain))
        columns = (choices.cost - price * choices.gains).argmin(axis=1)
        new_cost, new_gain = _line(choices, columns)
        # No assignment is cheaper at the crossing than the two lines: it is the maximum.
        gap = (low_cost - price * low_gain) - (new_cost - price * new_gain)
        # A line that is lower at the crossing only by rounding is the crossing itself.
        if gap <= _ROUNDING * (abs(low_cost) + abs(price * low_gain) + abs(high_cost)):
            break
        if new_gain >= choices.floor:
            above = columns
            high_cost = new_cost
            high_gain = new_gain
        else:
            below = columns
            low_cost = new_cost
            low_gain = new_gain
    return price, below, above


def _line(choices: ChoiceSet, columns: Ints) -> tuple[float, int]:
    """Return the cost and the gain of an assignment: intercept and slope of its line."""
    cost = float(choices.cost[choices.rows, columns].sum())
    return cost, int(choices.gains_of(columns).sum())
