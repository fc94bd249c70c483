"""The Lagrangian dual of a menu: a lower bound, reduced costs, and where the optimum is close to.

Pricing the constraints (see `task.py`) takes the coupling out, and every linear chooses alone:

    L(lambda, mu) = sum_l min_j [ cost[l, j] + mu changed[l, j] - price[stage l] gain[l, j] ]
                    + sum_p lambda_p floor_p + lambda_0 least - mu max_changes
    price[p] = lambda_0 + lambda_p,  lambda, mu >= 0

L never exceeds the optimum, and its maximum equals the bound of the linear relaxation. The maximum
is found by three nested searches, each over one price and each by secants: the value at a price
is the lower envelope of lines (one per assignment), so the crossing of a line from the too-cheap
side with one from the too-dear side is the next price to try, until no line lies below the
crossing. That ends after finitely many steps (about ten), exactly at the maximum:

    stages    price_p alone meets floor_p; all stages at once, as they do not see each other
    overall   lambda_0: a stage's price is max(lambda_0, its own), because prices add up
    changes   mu, around both

Numbers are doubles; the bound is evaluated with an error allowance and is safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_snip.planning.menu import Menu
from megatron_snip.planning.table import Floats, Ints

_MAX_SECANTS = 200
_ROUNDING = 16 * np.finfo(np.float64).eps


@dataclass(frozen=True, eq=False)
class Prices:
    """A point of the dual.

    Attributes:
        stage: [p], lambda_p: what a stage's own floor adds to the price of a gain.
        overall: lambda_0.
        change: mu.
    """

    stage: Floats
    overall: float
    change: float


@dataclass(frozen=True, eq=False)
class Dual:
    """The dual's maximum.

    Attributes:
        prices: where it is.
        bound: safe lower bound on the cost of any assignment.
        reduced: [n, k], by how much the bound grows if the choice is forced; inf where out.
        below: [n], columns that the prices ask for, erring on the side of too little gain.
        above: [n], the same, erring on the side of enough.
    """

    prices: Prices
    bound: float
    reduced: Floats
    below: Ints
    above: Ints


@dataclass(frozen=True, eq=False)
class _Point:
    """What an LP solution at some prices amounts to: its cost (with mu), gain and changes."""

    prices: Prices
    cost: float
    gain: float
    changes: float
    below: Ints
    above: Ints


def maximize(menu: Menu) -> Dual:
    """Return the dual's maximum.

    Args:
        menu: of a feasible task.
    """
    return _evaluate(menu, _search_change_price(menu))


def _evaluate(menu: Menu, point: _Point) -> Dual:
    prices = point.prices
    price = prices.overall + prices.stage
    paid = price[menu.stage][:, None] * menu.gain
    value = menu.cost + prices.change * menu.changed - paid
    best = value.min(axis=1)
    terms = [*best]
    terms += [p * f for p, f in zip(prices.stage, menu.floors, strict=True) if p > 0]
    terms += [prices.overall * menu.least] if prices.overall > 0 else []
    terms += [-prices.change * menu.max_changes] if prices.change > 0 else []
    chosen = value.argmin(axis=1)
    rows = np.arange(len(chosen))
    size = np.abs(menu.cost[rows, chosen]).sum() + np.abs(paid[rows, chosen]).sum()
    size += math.fsum(map(abs, terms)) + prices.change * menu.changed[rows, chosen].sum()
    bound = math.fsum(terms) - _ROUNDING * float(size)
    return Dual(prices, bound, value - best[:, None], point.below, point.above)


class _Chooser:
    """Sums of cost, gain and changes by stage, of what every linear chooses at given prices."""

    def __init__(self, menu: Menu, change_price: float) -> None:
        self.menu = menu
        self.cost = menu.cost + change_price * menu.changed
        self.rows = np.arange(len(menu.cost))
        self.num_stages = len(menu.floors)

    def choose(self, price: Floats) -> Ints:
        """Return the columns that cost least at a price by stage."""
        value = self.cost - price[self.menu.stage][:, None] * self.menu.gain
        columns: Ints = value.argmin(axis=1)
        return columns

    def extreme(self) -> tuple[Ints, Ints]:
        """Return the columns of least cost (then most gain), and of most gain (then least cost)."""
        gain = np.where(np.isfinite(self.cost), self.menu.gain, -np.inf)
        cheap = np.where(self.cost == self.cost.min(axis=1, keepdims=True), gain, -np.inf)
        rich = np.where(gain == gain.max(axis=1, keepdims=True), self.cost, np.inf)
        return cheap.argmax(axis=1), rich.argmin(axis=1)

    def sums(self, columns: Ints) -> tuple[Floats, Floats, Floats]:
        """Return cost, gain and changes of each stage."""
        return (
            self._by_stage(self.cost[self.rows, columns]),
            self._by_stage(self.menu.gain[self.rows, columns]),
            self._by_stage(self.menu.changed[self.rows, columns]),
        )

    def _by_stage(self, values: Floats) -> Floats:
        sums = np.bincount(self.menu.stage, weights=values, minlength=self.num_stages)
        return sums.astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class _Stages:
    """Every stage at the price that meets its own floor.

    Attributes:
        price: [p].
        cost, gain, changes: [p], of the LP solution at that price.
        below, above: [n], the assignments on either side of the floor.
    """

    price: Floats
    cost: Floats
    gain: Floats
    changes: Floats
    below: Ints
    above: Ints


def _search_stage_prices(chooser: _Chooser) -> _Stages:
    menu = chooser.menu
    below, above = chooser.extreme()
    low, high = chooser.sums(below), chooser.sums(above)
    floors = menu.floors
    met = low[1] >= floors
    price = np.zeros(chooser.num_stages)
    open_ = ~met & (high[1] > low[1])
    for _ in range(_MAX_SECANTS):
        if not open_.any():
            break
        slope = (high[0] - low[0])[open_] / (high[1] - low[1])[open_]
        price[open_] = np.maximum(slope, 0.0)
        columns = chooser.choose(price)
        now = chooser.sums(columns)
        line = low[0] - price * low[1]
        gap = line - (now[0] - price * now[1])
        # A line below the crossing by no more than rounding is the crossing itself.
        noise = _ROUNDING * (np.abs(low[0]) + np.abs(price * low[1]) + np.abs(high[0]))
        open_ = open_ & (gap > noise)
        enough = open_ & (now[1] >= floors)
        short = open_ & ~enough
        for side, mask in ((high, enough), (low, short)):
            for old, new in zip(side, now, strict=True):
                old[mask] = new[mask]
        above = np.where(enough[menu.stage], columns, above)
        below = np.where(short[menu.stage], columns, below)
    above = np.where(met[menu.stage], below, above)
    span = np.where(met, 1.0, high[1] - low[1])
    share = np.where(met | (span <= 0), 0.0, (floors - low[1]) / np.where(span > 0, span, 1.0))
    mixed = [old + share * (new - old) for old, new in zip(low, high, strict=True)]
    return _Stages(price, mixed[0], mixed[1], mixed[2], below, above)


def _search_overall_price(chooser: _Chooser) -> _Point:
    menu = chooser.menu
    stages = _search_stage_prices(chooser)
    low = _at(chooser, stages, 0.0)
    if low.gain >= menu.least:
        return low
    high = _richest(chooser, stages)
    price = 0.0
    for _ in range(_MAX_SECANTS):
        if high.gain <= low.gain:
            break
        price = max(0.0, (high.cost - low.cost) / (high.gain - low.gain))
        now = _at(chooser, stages, price)
        gap = (low.cost - price * low.gain) - (now.cost - price * now.gain)
        if gap <= _ROUNDING * (abs(low.cost) + abs(price * low.gain) + abs(high.cost)):
            break
        if now.gain >= menu.least:
            high = now
        else:
            low = now
    share = 0.0
    if high.gain > low.gain:
        share = (menu.least - low.gain) / (high.gain - low.gain)
    own = np.maximum(stages.price - price, 0.0)
    return _Point(
        Prices(own, price, 0.0),
        low.cost + share * (high.cost - low.cost),
        menu.least,
        low.changes + share * (high.changes - low.changes),
        low.below,
        high.above,
    )


def _at(chooser: _Chooser, stages: _Stages, overall: float) -> _Point:
    """Return the LP solution where every stage pays the larger of `overall` and its own price."""
    own = stages.price > overall
    columns = chooser.choose(np.maximum(stages.price, overall))
    sums = chooser.sums(columns)
    parts = (stages.cost, stages.gain, stages.changes)
    totals = [np.where(own, part, new).sum() for part, new in zip(parts, sums, strict=True)]
    mine = own[chooser.menu.stage]
    if overall == 0.0:  # free stages: the side with the most gain at no cost is in `below` already
        columns = stages.below
        sums = chooser.sums(columns)
        totals = [np.where(own, part, new).sum() for part, new in zip(parts, sums, strict=True)]
    prices = Prices(np.maximum(stages.price - overall, 0.0), overall, 0.0)
    below = np.where(mine, stages.below, columns)
    above = np.where(mine, stages.above, columns)
    return _Point(prices, float(totals[0]), float(totals[1]), float(totals[2]), below, above)


def _richest(chooser: _Chooser, stages: _Stages) -> _Point:
    _, rich = chooser.extreme()
    cost, gain, changes = (float(part.sum()) for part in chooser.sums(rich))
    return _Point(Prices(stages.price, math.inf, 0.0), cost, gain, changes, rich, rich)


def _search_change_price(menu: Menu) -> _Point:
    free = _search_overall_price(_Chooser(menu, 0.0))
    limit = menu.max_changes
    if free.changes <= limit:
        return free
    low, high = free, _few_changes(menu, free)
    price = high.prices.change
    best = high
    for _ in range(_MAX_SECANTS):
        # With cost = quality + price * changes, a line is quality + price * (changes - limit).
        quality = [p.cost - p.prices.change * p.changes for p in (low, high)]
        if low.changes <= high.changes:
            break
        price = max(0.0, (quality[1] - quality[0]) / (low.changes - high.changes))
        now = _priced(menu, price)
        line = quality[0] + price * low.changes
        best = now
        if line - now.cost <= 1e-12 * (abs(line) + abs(now.cost)):
            break
        if now.changes <= limit:
            high = now
        else:
            low = now
    return best


def _few_changes(menu: Menu, free: _Point) -> _Point:
    """Return a point whose price of a change is high enough that the limit is kept."""
    finite = np.where(np.isfinite(menu.cost), menu.cost, np.nan)
    price = float(np.nanmax(finite, axis=1).sum() - np.nanmin(finite, axis=1).sum())
    price = price / len(finite) or 1.0
    point = free
    for _ in range(60):
        point = _priced(menu, price)
        if point.changes <= menu.max_changes + 1e-9:
            break
        price *= 4.0
    return point


def _priced(menu: Menu, price: float) -> _Point:
    point = _search_overall_price(_Chooser(menu, price))
    prices = Prices(point.prices.stage, point.prices.overall, price)
    return _Point(prices, point.cost, point.gain, point.changes, point.below, point.above)
