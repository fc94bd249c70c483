"""CostTable: what each option of each linear saves, exactly and in integers.

For linear l and option q:

    weight[l]    the largest possible gain
    gain[l, q]   the gain under q
    efficiency of an assignment x  =  sum_l gain[l, x_l] / sum_l weight[l]

`flops` (arXiv:2602.01410, Sec. 5): the share of linear FLOPs in the lowest precision. The lowest
precision counts as twice as fast; the time serves only to find the slowest pipeline stage:

    weight = flops               gain = flops * saving        time = flops - gain / 2

`time`: seconds saved as a share of the seconds that can be saved, from a measured table. Slowest
and fastest are over all options in the problem, forbidden ones included:

    weight = slowest - fastest   gain = slowest - seconds     time = slowest - gain

In both, time = base - rate * gain. The efficiency of a part without work is 1. Sums are exact
(rational arithmetic), and the efficiency is rounded to a double once, at the end.

The solver needs integers. With a unit u, `sum of gains >= least` becomes
`sum of ceil(gain / u) >= ceil(least / u)`:

    exact      one u divides all gains, and the integers stay below 2^46 in total. FLOP counts and
               thirds of them do.
    rounded    u = (largest possible sum) / 2^46. No plan that reaches `least` is lost. An
               accepted plan misses it by less than (number of linears) * u.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_snip.config import CostName
from megatron_snip.errors import UsageError
from megatron_snip.options import BF16
from megatron_snip.planning.problem import LinearChoices, PlanningProblem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

TOLERANCE = Fraction(1, 10**9)
"""An accepted plan's efficiency is at most this far below its target. It covers `NOISE` and the
rounding to integers."""

NOISE = Fraction(1, 10**12)
"""Efficiencies this close to the target reach it. It covers the rounding of a problem's doubles
(thirds, targets such as 0.15000000000000002)."""

MAX_SUM = 2**46
"""Sums of a row's integers stay below this (plus rounding): exact in int64 and in a double."""

RATES: dict[CostName, Fraction] = {"flops": Fraction(1, 2), "time": Fraction(1)}
"""Time saved per gain, by cost model."""

_SIMPLE_DENOMINATOR = 64
_MAX_UNIT_DENOMINATOR = 2**80


@lru_cache(maxsize=65536)
def as_fraction(value: float) -> Fraction:
    """Return k/d with d <= 64 if it rounds to `value`, else `value` exactly.

    So thirds (one GEMM of three in the lowest precision) add up without rounding.
    """
    simple = Fraction(value).limit_denominator(_SIMPLE_DENOMINATOR)
    return simple if float(simple) == value else Fraction(value)


def ratio(gained: Fraction, weight: Fraction) -> float:
    """Return gained / weight as an efficiency; 1 where there is no work."""
    return float(gained / weight) if weight else 1.0


def choose_unit(values: Iterable[Fraction], largest_sum: Fraction) -> tuple[Fraction, bool]:
    """Return the unit of a row's integers.

    Args:
        values: the distinct gains of the row.
        largest_sum: upper bound of the sum of magnitudes of any assignment.

    Returns:
        The unit, and whether every value is a multiple of it.
    """
    unit = Fraction(0)
    for value in values:  # the greatest common divisor of fractions
        denominator = math.lcm(unit.denominator, value.denominator)
        if denominator > _MAX_UNIT_DENOMINATOR:
            return largest_sum / MAX_SUM, False
        unit = Fraction(math.gcd(*(int(v * denominator) for v in (unit, value))), denominator)
    if not unit or not largest_sum:
        return Fraction(1), True
    exact = largest_sum / unit <= MAX_SUM
    return (unit if exact else largest_sum / MAX_SUM), exact


class Shape(NamedTuple):
    """The exact work that linears of equal FLOPs and options share.

    Attributes:
        options: names, by column.
        num_listed: how many of them the problem lists; the rest is an unlisted bf16.
        base: time without any saving.
        weight: largest possible gain.
        gains: by column.
    """

    options: tuple[str, ...]
    num_listed: int
    base: Fraction
    weight: Fraction
    gains: tuple[Fraction, ...]


class GainRow(NamedTuple):
    """Integer gains, with one unit for the model or one for each stage.

    Attributes:
        coefficients: [n, k], int64; 0 in padding.
        units: gain per integer step.
    """

    coefficients: Ints
    units: tuple[Fraction, ...]


@dataclass(frozen=True, eq=False)
class CostTable:
    """A problem as arrays: n linears (rows), at most k options each (columns).

    bf16 changes nothing, so pins and policies may ask for it where a problem does not list it. It
    then has quality loss 0 and gain 0 in a column that is not `listed`. Cost `time` cannot add
    such a column, because the seconds are unknown.

    Attributes:
        problem: the source.
        rate: time saved per gain.
        shapes: the distinct shapes.
        shape: [n], index into `shapes`.
        listed: [n, k], True where the problem lists the option.
        quality: [n, k], quality loss; NaN where forbidden or padded.
        stage: [n], pipeline stage.
    """

    problem: PlanningProblem
    rate: Fraction
    shapes: tuple[Shape, ...]
    shape: Ints
    listed: Mask
    quality: Floats
    stage: Ints

    @property
    def available(self) -> Mask:
        """[n, k], True where an option is listed and not forbidden."""
        allowed: Mask = self.listed & ~np.isnan(self.quality)
        return allowed

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the linears, by row."""
        return self.problem.names

    @cached_property
    def rows(self) -> Ints:
        """0 .. n-1, for indexing one column per row."""
        return np.arange(len(self.shape))

    @cached_property
    def members(self) -> tuple[Ints, ...]:
        """Rows of each stage."""
        return tuple(np.flatnonzero(self.stage == p) for p in range(self.problem.num_stages))

    @cached_property
    def stage_weights(self) -> tuple[Fraction, ...]:
        """Weight of each stage."""
        return tuple(self._total(rows, [s.weight for s in self.shapes]) for rows in self.members)

    @cached_property
    def stage_bases(self) -> tuple[Fraction, ...]:
        """Time of each stage without any saving."""
        return tuple(self._total(rows, [s.base for s in self.shapes]) for rows in self.members)

    @cached_property
    def weight(self) -> Fraction:
        """Weight of the model."""
        return sum(self.stage_weights, Fraction(0))

    @cached_property
    def overall_row(self) -> GainRow:
        """Integer gains with one unit for the model."""
        return self._integer_gains((self.rows,))

    @cached_property
    def stage_row(self) -> GainRow:
        """Integer gains with one unit for each stage."""
        return self._integer_gains(self.members)

    def options(self, row: int) -> tuple[str, ...]:
        """Return the option names of a linear, by column."""
        return self.shapes[int(self.shape[row])].options

    def columns_of(self, assignment: Sequence[str]) -> Ints:
        """Return the column of each linear's option ([n]); -1 where there is none."""
        columns = [{name: j for j, name in enumerate(s.options)} for s in self.shapes]
        pairs = zip(self.shape.tolist(), assignment, strict=True)
        return np.array([columns[s].get(name, -1) for s, name in pairs], dtype=np.int64)

    def stage_gains(self, columns: Ints) -> tuple[Fraction, ...]:
        """Return the exact gain of each stage under an assignment ([n] columns)."""
        width = self.listed.shape[1]
        gains = []
        for rows in self.members:
            codes, counts = np.unique(self.shape[rows] * width + columns[rows], return_counts=True)
            terms = (
                count * self.shapes[code // width].gains[code % width]
                for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
            )
            gains.append(sum(terms, Fraction(0)))
        return tuple(gains)

    def efficiency(self, columns: Ints) -> float:
        """Return the efficiency of an assignment over all linears."""
        return ratio(sum(self.stage_gains(columns), Fraction(0)), self.weight)

    def stage_efficiencies(self, columns: Ints) -> tuple[float, ...]:
        """Return the efficiency of an assignment in each stage."""
        gains = self.stage_gains(columns)
        return tuple(ratio(g, w) for g, w in zip(gains, self.stage_weights, strict=True))

    def quality_loss(self, columns: Ints) -> float:
        """Return the sum of quality losses, correctly rounded; NaN if one is unknown."""
        return math.fsum(self.quality[self.rows, columns])

    def _total(self, rows: Ints, values: Sequence[Fraction]) -> Fraction:
        counts = np.bincount(self.shape[rows], minlength=len(values)).tolist()
        return sum((c * v for c, v in zip(counts, values, strict=True) if c), Fraction(0))

    def _integer_gains(self, groups: Sequence[Ints]) -> GainRow:
        coefficients = np.zeros(self.listed.shape, dtype=np.int64)
        units = []
        for rows in groups:
            largest = self._total(rows, [max(s.gains) for s in self.shapes])
            used = np.unique(self.shape[rows]).tolist()
            unit, exact = choose_unit({g for s in used for g in self.shapes[s].gains}, largest)
            if not exact and len(rows) * unit > TOLERANCE * largest:
                raise UsageError(
                    f"{len(rows)} linears whose FLOPs share no unit cannot be planned to "
                    f"{float(TOLERANCE):g}; round the FLOPs to integers"
                )
            integers = np.zeros((len(self.shapes), self.listed.shape[1]), dtype=np.int64)
            for s in used:
                gains = self.shapes[s].gains
                integers[s, : len(gains)] = [math.ceil(gain / unit) for gain in gains]
            coefficients[rows] = integers[self.shape[rows]]
            units.append(unit)
        return GainRow(coefficients, tuple(units))


def make_table(problem: PlanningProblem, cost: CostName) -> CostTable:
    """Build the arrays of a problem under a cost model.

    Raises:
        UsageError: if cost `time` lacks the seconds of an option.
    """
    shapes: dict[object, int] = {}
    distinct: list[Shape] = []
    index = []
    for linear in problem.linears:
        by_flops = cost == "flops"
        costs = linear.options.items()
        numbers = [(name, c.saving if by_flops else c.seconds) for name, c in costs]
        key = (linear.flops if by_flops else 0.0, *numbers)
        if key not in shapes:
            shapes[key] = len(shapes)
            distinct.append(_shape(linear, cost))
        index.append(shapes[key])
    shape = np.array(index)
    columns = np.arange(max(len(s.options) for s in distinct))
    widths = np.array([(s.num_listed, len(s.options)) for s in distinct])[shape]
    listed = columns < widths[:, :1]
    quality = np.where(columns < widths[:, 1:], 0.0, np.nan)
    for row, linear in enumerate(problem.linears):
        losses = [c.quality_loss for c in linear.options.values()]
        quality[row, : len(losses)] = [math.nan if loss is None else loss for loss in losses]
    stage = np.array([linear.stage for linear in problem.linears], dtype=np.int64)
    return CostTable(problem, RATES[cost], tuple(distinct), shape, listed, quality, stage)


def _shape(linear: LinearChoices, cost: CostName) -> Shape:
    options = tuple(linear.options)
    if cost == "flops":
        base = weight = as_fraction(linear.flops)
        gains = [base * as_fraction(c.saving) for c in linear.options.values()]
        if str(BF16) not in options:
            unlisted = (*options, str(BF16))
            return Shape(unlisted, len(options), base, weight, (*gains, Fraction(0)))
    else:
        seconds = [_seconds(linear, name) for name in linear.options]
        base = max(seconds)
        weight = base - min(seconds)
        gains = [base - taken for taken in seconds]
    return Shape(options, len(options), base, weight, tuple(gains))


def _seconds(linear: LinearChoices, name: str) -> Fraction:
    seconds = linear.options[name].seconds
    if seconds is None:
        raise UsageError(
            f"cost 'time' needs seconds for every option, and '{linear.name}' has none for "
            f"'{name}'; give a table made by 'megatron-snip calibrate', or use cost 'flops'"
        )
    return as_fraction(seconds)
