"""A task's choice set, and its Lagrangian dual: a bound and assignments close to the optimum.

A choice is dominated if another choice of the same linear costs no more and gains no less. A choice
set has no dominated choices. Its constraints are sums of integers that must reach a threshold.

With a price on every gain the linears are independent, and each takes its cheapest choice:

    L(lambda) = sum_l min_j [ cost[l, j] - price[stage l] gain[l, j] ]
                + sum_p lambda_p stage_floor_p + lambda_0 overall_floor
    price[p]  = lambda_0 + lambda_p,  lambda >= 0

L never exceeds the optimum, and its maximum equals the bound of the linear relaxation. Two nested
searches find the maximum, each over one price and by secants. The value at a price is the lower
envelope of lines (one per assignment). The crossing of a line from below the floor with a line from
above is the next price, until no line is lower at the crossing. This ends after finitely many steps
(about ten), exactly at the maximum:

    stages    with lambda_0 = 0 each stage has a price of its own, own_p, that meets
              stage_floor_p. All are found at once, because the stages are independent
    overall   lambda_0. The best lambda_p is then max(0, own_p - lambda_0), so that the price of a
              stage is max(lambda_0, own_p)

Numbers are doubles; the bound has an allowance for rounding errors and is safe.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_snip.planning.constraints import IntegerFloors, Task
from megatron_snip.planning.option_table import Floats, Ints, Mask

_MAX_SECANTS = 200
_ROUNDING = 16 * np.finfo(np.float64).eps


@dataclass(frozen=True, eq=False)
class ChoiceSet:
    """The choices of m linears and the constraints on them.

    Attributes:
        linears: Rows of the linears in the table, [m].
        cost: The cost to be minimized, [m, k]; inf for dropped choices.
        gain: The gains as doubles in one unit for all linears, [m, k].
        stage: The stage of each linear, [m].
        stage_floors: The least gain of each stage in units of `gain`, [p]; -inf without one.
        overall_floor: The least gain of all linears in units of `gain`; -inf without one.
        integer_floors: The same floors in the solver's integers: those of the stages (if any), then
            the overall one.
    """

    linears: Ints
    cost: Floats
    gain: Floats
    stage: Ints
    stage_floors: Floats
    overall_floor: float
    integer_floors: tuple[IntegerFloors, ...]

    @cached_property
    def rows(self) -> Ints:
        """0 .. m-1, for indexing one column per linear."""
        return np.arange(len(self.linears))

    def cost_of(self, columns: Ints) -> float:
        """Return the cost of an assignment ([m] columns)."""
        return math.fsum(self.cost[self.rows, columns])

    def holds(self, columns: Ints) -> bool:
        """Whether an assignment uses no dropped choice and satisfies every constraint."""
        if not np.isfinite(self.cost[self.rows, columns]).all():
            return False
        return all((floors.missing(columns) <= 0).all() for floors in self.integer_floors)

    def without_unusable(self, columns: Ints) -> Ints:
        """Replace dropped choices by the cheapest ones with as much gain.

        Where there is none, the result does not hold.
        """
        dropped = ~np.isfinite(self.cost[self.rows, columns])
        suits = np.isfinite(self.cost)
        for floors in self.integer_floors:
            suits &= floors.gains >= floors.gains_of(columns)[:, None]
        best: Ints = np.where(suits, self.cost, np.inf).argmin(axis=1)
        return np.where(dropped, best, columns)


def make_choices(task: Task) -> list[ChoiceSet]:
    """Return the choice sets of a task: one a stage where only the stages have floors."""
    table = task.table
    cost = np.where(task.allowed & ~_dominated(task), task.cost, np.inf)
    overall = task.integer_floors[-1]
    stage_floors = np.full(table.problem.num_stages, -math.inf)
    if task.stage_floors is None:
        gain = overall.gains.astype(np.float64)
    else:
        stages = task.integer_floors[0]
        if task.overall_floor is None or sum(task.stage_floors) >= task.overall_floor:
            # The stages' floors imply the overall one, so the stages are independent.
            return [
                _stage_choices(rows, cost[rows], stages.gains[rows], stages.least[[p]])
                for p, rows in enumerate(table.members)
                if len(rows)
            ]
        # Each stage counts in a unit of its own; doubles bring all of them to the overall one.
        overall_unit = table.integer_gains.units[0]
        stage_units = table.integer_gains_by_stage.units
        units = np.array([float(unit / overall_unit) for unit in stage_units])
        gain = stages.gains * units[table.stage][:, None]
        used = np.unique(table.stage)
        stage_floors[used] = stages.least[used] * units[used]
    return [
        ChoiceSet(
            linears=table.rows,
            cost=cost,
            gain=gain,
            stage=table.stage,
            stage_floors=stage_floors,
            overall_floor=float(overall.least[0]),
            integer_floors=task.integer_floors,
        )
    ]


def _stage_choices(linears: Ints, cost: Floats, gains: Ints, least: Ints) -> ChoiceSet:
    """Return the choice set of one stage; the stage's floor is the set's overall floor."""
    stage = np.zeros(len(linears), dtype=np.int64)
    return ChoiceSet(
        linears=linears,
        cost=cost,
        gain=gains.astype(np.float64),
        stage=stage,
        stage_floors=np.array([-math.inf]),
        overall_floor=float(least[0]),
        integer_floors=(IntegerFloors(gains, stage, least),),
    )


def _dominated(task: Task) -> Mask:
    """Return the choices [n, k] that another one of the linear makes superfluous."""
    worst = np.iinfo(np.int64).min
    # In each criterion a larger value is better.
    criteria = [-np.where(task.allowed, task.cost, np.inf)]
    criteria += [np.where(task.allowed, floors.gains, worst) for floors in task.integer_floors]
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
        below: Columns of least cost at the prices, [m]. Where columns tie, the ones of too little
            gain.
        above: Columns of least cost at the prices, [m]. Where columns tie, the ones of enough gain.
    """

    bound: float
    reduced: Floats
    below: Ints
    above: Ints


class _Point(NamedTuple):
    """The solution of the linear relaxation at some prices.

    Attributes:
        overall_price: lambda_0.
        extra_prices: lambda_p of each stage, [p], which comes on top of lambda_0.
        cost: Cost of the solution.
        gain: Gain of the solution.
        below: The assignment with too little gain, [m].
        above: The assignment with enough gain, [m].
    """

    overall_price: float
    extra_prices: Floats
    cost: float
    gain: float
    below: Ints
    above: Ints


class _Sums(NamedTuple):
    """What an assignment costs and gains.

    Attributes:
        cost: Cost of each stage, [p].
        gain: Gain of each stage, [p].
    """

    cost: Floats
    gain: Floats


class _Stages(NamedTuple):
    """Every stage at the price that meets its own floor.

    Attributes:
        own_price: own_p, the price of each stage where lambda_0 is 0, [p].
        cost: Cost of each stage's solution, [p].
        gain: Gain of each stage's solution, [p].
        below: The assignment below the floors, [m].
        above: The assignment above the floors, [m].
    """

    own_price: Floats
    cost: Floats
    gain: Floats
    below: Ints
    above: Ints


def maximize(choices: ChoiceSet) -> Dual:
    """Return the dual's maximum.

    Args:
        choices: The choice set of a feasible task.
    """
    point = _solve_overall(choices)
    price = (point.overall_price + point.extra_prices)[choices.stage]
    paid = price[:, None] * choices.gain
    value = choices.cost - paid
    best = value.min(axis=1)

    terms = list(best)
    for lambda_p, floor in zip(point.extra_prices, choices.stage_floors, strict=True):
        if lambda_p > 0:  # the floor is finite then
            terms.append(lambda_p * floor)
    if point.overall_price > 0:
        terms.append(point.overall_price * choices.overall_floor)

    # The allowance for rounding is in proportion to all numbers that were added.
    chosen = (choices.rows, value.argmin(axis=1))
    size = np.abs(choices.cost[chosen]).sum() + np.abs(paid[chosen]).sum()
    size += math.fsum(map(abs, terms))
    bound = math.fsum(terms) - _ROUNDING * float(size)
    return Dual(bound, value - best[:, None], point.below, point.above)


def _cheapest(choices: ChoiceSet, price: Floats) -> Ints:
    """Return the columns of least cost at a price by stage."""
    columns: Ints = (choices.cost - price[choices.stage][:, None] * choices.gain).argmin(axis=1)
    return columns


def _extremes(choices: ChoiceSet) -> tuple[Ints, Ints]:
    """Return the columns of least cost (then most gain), and of most gain (then least cost)."""
    cost = choices.cost
    gain = np.where(np.isfinite(cost), choices.gain, -np.inf)
    cheap = np.where(cost == cost.min(axis=1, keepdims=True), gain, -np.inf)
    rich = np.where(gain == gain.max(axis=1, keepdims=True), cost, np.inf)
    return cheap.argmax(axis=1), rich.argmin(axis=1)


def _sums(choices: ChoiceSet, columns: Ints) -> _Sums:
    """Return the cost and gain of each stage under an assignment."""
    num_stages = len(choices.stage_floors)

    def by_stage(values: Floats) -> Floats:
        of_linears = values[choices.rows, columns]
        return np.bincount(choices.stage, of_linears, num_stages).astype(np.float64)

    return _Sums(by_stage(choices.cost), by_stage(choices.gain))


def _solve_stages(choices: ChoiceSet) -> _Stages:
    """Return every stage at the price that meets its own floor, found by secants.

    `low` and `high` are assignments with too little and with enough gain. As lines over the price,
    cost - price * gain, they cross at the next price to try.
    """
    stage = choices.stage
    floors = choices.stage_floors
    below, above = _extremes(choices)
    low = _sums(choices, below)
    high = _sums(choices, above)
    met = low.gain >= floors
    price = np.zeros(len(floors))
    open_ = ~met & (high.gain > low.gain)
    for _ in range(_MAX_SECANTS):
        if not open_.any():
            break
        slope = (high.cost - low.cost)[open_] / (high.gain - low.gain)[open_]
        price[open_] = np.maximum(slope, 0.0)
        columns = _cheapest(choices, price)
        now = _sums(choices, columns)
        line = low.cost - price * low.gain
        gap = line - (now.cost - price * now.gain)
        # A line that is lower at the crossing only by rounding is the crossing itself.
        noise = _ROUNDING * (np.abs(low.cost) + np.abs(price * low.gain) + np.abs(high.cost))
        open_ = open_ & (gap > noise)
        enough = open_ & (now.gain >= floors)
        short = open_ & ~enough
        for side, stages in ((high, enough), (low, short)):
            side.cost[stages] = now.cost[stages]
            side.gain[stages] = now.gain[stages]
        above = np.where(enough[stage], columns, above)
        below = np.where(short[stage], columns, below)
    above = np.where(met[stage], below, above)
    # Where a floor lies between the two gains, the relaxation mixes the two assignments.
    span = np.where(met, 1.0, high.gain - low.gain)
    share = np.where(met | (span <= 0), 0.0, (floors - low.gain) / np.where(span > 0, span, 1.0))
    cost = low.cost + share * (high.cost - low.cost)
    gain = low.gain + share * (high.gain - low.gain)
    return _Stages(price, cost, gain, below, above)


def _solve_overall(choices: ChoiceSet) -> _Point:
    """Return the solution at the overall price that meets the overall floor, found by secants."""
    stages = _solve_stages(choices)
    low = _at(choices, stages, 0.0)
    if low.gain >= choices.overall_floor:
        return low
    richest = _extremes(choices)[1]
    stage_costs, stage_gains = _sums(choices, richest)
    high = _Point(
        overall_price=math.inf,
        extra_prices=stages.own_price,
        cost=float(stage_costs.sum()),
        gain=float(stage_gains.sum()),
        below=richest,
        above=richest,
    )
    price = 0.0
    for _ in range(_MAX_SECANTS):
        if high.gain <= low.gain:
            break
        price = max(0.0, (high.cost - low.cost) / (high.gain - low.gain))
        now = _at(choices, stages, price)
        gap = (low.cost - price * low.gain) - (now.cost - price * now.gain)
        if gap <= _ROUNDING * (abs(low.cost) + abs(price * low.gain) + abs(high.cost)):
            break
        if now.gain >= choices.overall_floor:
            high = now
        else:
            low = now
    extra_prices = np.maximum(stages.own_price - price, 0.0)
    return low._replace(overall_price=price, extra_prices=extra_prices, above=high.above)


def _at(choices: ChoiceSet, stages: _Stages, overall: float) -> _Point:
    """Return the solution where every stage pays the larger of `overall` and its own price."""
    pays_own = stages.own_price > overall
    if overall == 0.0:  # stages without a price: `below` has the most gain at no cost
        columns = stages.below
    else:
        columns = _cheapest(choices, np.maximum(stages.own_price, overall))
    stage_costs, stage_gains = _sums(choices, columns)
    linear_pays_own = pays_own[choices.stage]
    return _Point(
        overall_price=overall,
        extra_prices=np.maximum(stages.own_price - overall, 0.0),
        cost=float(np.where(pays_own, stages.cost, stage_costs).sum()),
        gain=float(np.where(pays_own, stages.gain, stage_gains).sum()),
        below=np.where(linear_pays_own, stages.below, columns),
        above=np.where(linear_pays_own, stages.above, columns),
    )
