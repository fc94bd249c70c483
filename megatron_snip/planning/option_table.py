"""OptionTable: what each option of each linear loses and saves, exactly and in integers.

For linear l and option q:

    max_gain[l]  the largest possible gain
    gain[l, q]   the gain under q
    efficiency of an assignment x  =  sum_l gain[l, x_l] / sum_l max_gain[l]

The setting `cost` decides what a gain is. `flops` (arXiv:2602.01410, Sec. 5): the share of linear
FLOPs in the lowest precision.

    max_gain = flops               gain = flops * saving

`time`: seconds saved as a share of the seconds that can be saved, from a measured table. `slowest`
and `fastest` are over all options that the problem lists for the linear:

    max_gain = slowest - fastest   gain = slowest - seconds

The efficiency of a stage that can gain nothing is 1. Sums are exact (rational arithmetic), and the
efficiency is rounded to a double once, at the end.

The solver needs integers. With a unit u, `sum of gains >= least` becomes
`sum of ceil(gain / u) >= ceil(least / u)`:

    exact      one u divides all gains, and the integers stay below 2^46 in total. This holds for
               FLOP counts and thirds of them.
    rounded    u = (largest possible sum) / 2^46. No plan that reaches `least` is lost. An
               accepted plan misses `least` by less than (number of linears) * u.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_snip.config import EfficiencyMeasure
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

_SIMPLE_DENOMINATOR = 64
_MAX_UNIT_DENOMINATOR = 2**80


@lru_cache(maxsize=65536)
def as_fraction(value: float) -> Fraction:
    """Return k/d with d <= 64 if it rounds to `value`, else `value` exactly.

    So thirds (one GEMM of three in the lowest precision) add up without rounding.
    """
    simple = Fraction(value).limit_denominator(_SIMPLE_DENOMINATOR)
    return simple if float(simple) == value else Fraction(value)


def ratio(gained: Fraction, max_gain: Fraction) -> float:
    """Return gained / max_gain as an efficiency; 1 where nothing can be gained."""
    return float(gained / max_gain) if max_gain else 1.0


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
        # Bounds the arithmetic: a double's denominator can be 2^1074.
        if denominator > _MAX_UNIT_DENOMINATOR:
            return largest_sum / MAX_SUM, False
        numerator = math.gcd(int(unit * denominator), int(value * denominator))
        unit = Fraction(numerator, denominator)
    if not unit or not largest_sum:
        return Fraction(1), True
    if largest_sum / unit <= MAX_SUM:
        return unit, True
    return largest_sum / MAX_SUM, False


class WorkClass(NamedTuple):
    """The exact work of linears that have equal FLOPs and equal options.

    A model of thousands of linears has a few such classes, and so few rational numbers to add.

    Attributes:
        options: Names of the options, by column. The last one may be a bf16 that the problem does
            not list (see `OptionTable`).
        num_listed: Number of options that the problem lists.
        max_gain: Largest possible gain of a linear.
        gains: Gain of each option, by column.
    """

    options: tuple[str, ...]
    num_listed: int
    max_gain: Fraction
    gains: tuple[Fraction, ...]


class IntegerGains(NamedTuple):
    """Integer gains, with one unit for the model or one for each stage.

    Attributes:
        coefficients: Integer gain of every option, [n, k], int64; 0 in padding.
        units: The gain that one integer step stands for: one number, or one for each stage.
    """

    coefficients: Ints
    units: tuple[Fraction, ...]


@dataclass(frozen=True, eq=False)
class OptionTable:
    """A problem as arrays: n linears (rows), at most k options each (columns).

    bf16 has no quantization error and saves no FLOPs. So its quality loss and gain are known to be
    0, and pins and policies may use it even if the problem does not list it: it is then a column
    that is not `listed`. Where the target counts seconds there is no such column, because those of
    bf16 are unknown.

    Attributes:
        problem: The problem that the arrays come from.
        classes: The distinct classes of linears.
        class_of: The index into `classes` of each linear, [n].
        listed: True where the problem lists the option, [n, k].
        losses: The quality losses, [n, k]; NaN in padding, and for a forbidden option: one whose
            quality loss is null in the problem, because it could not be measured.
        stage: The pipeline stage of each linear, [n].
    """

    problem: PlanningProblem
    classes: tuple[WorkClass, ...]
    class_of: Ints
    listed: Mask
    losses: Floats
    stage: Ints

    @property
    def available(self) -> Mask:
        """[n, k], True where an option is listed and not forbidden."""
        available: Mask = self.listed & ~np.isnan(self.losses)
        return available

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the linears, by row."""
        return self.problem.names

    @cached_property
    def rows(self) -> Ints:
        """0 .. n-1, for indexing one column per row."""
        return np.arange(len(self.class_of))

    @cached_property
    def members(self) -> tuple[Ints, ...]:
        """Rows of each stage."""
        return tuple(np.flatnonzero(self.stage == p) for p in range(self.problem.num_stages))

    @cached_property
    def stage_max_gains(self) -> tuple[Fraction, ...]:
        """Largest possible gain of each stage."""
        max_gains = [each.max_gain for each in self.classes]
        return tuple(self._total(rows, max_gains) for rows in self.members)

    @cached_property
    def max_gain(self) -> Fraction:
        """Largest possible gain of the model."""
        return sum(self.stage_max_gains, Fraction(0))

    @cached_property
    def integer_gains(self) -> IntegerGains:
        """Integer gains with one unit for the model."""
        return self._integer_gains((self.rows,))

    @cached_property
    def integer_gains_by_stage(self) -> IntegerGains:
        """Integer gains with one unit for each stage."""
        return self._integer_gains(self.members)

    def options(self, row: int) -> tuple[str, ...]:
        """Return the option names of a linear, by column."""
        return self.classes[int(self.class_of[row])].options

    def columns_of(self, assignment: Sequence[str]) -> Ints:
        """Return the column of each linear's option ([n]); -1 where there is none."""
        column_in_class = []
        for each in self.classes:
            column_in_class.append({name: column for column, name in enumerate(each.options)})
        pairs = zip(self.class_of.tolist(), assignment, strict=True)
        columns = [column_in_class[index].get(name, -1) for index, name in pairs]
        return np.array(columns, dtype=np.int64)

    def stage_gains(self, columns: Ints) -> tuple[Fraction, ...]:
        """Return the exact gain of each stage under an assignment ([n] columns)."""
        # Rational numbers are slow: each distinct (class, column) is counted first and added once.
        width = self.listed.shape[1]
        stage_gains = []
        for rows in self.members:
            codes = self.class_of[rows] * width + columns[rows]
            distinct, counts = np.unique(codes, return_counts=True)
            total = Fraction(0)
            for code, count in zip(distinct.tolist(), counts.tolist(), strict=True):
                index, column = divmod(code, width)
                total += count * self.classes[index].gains[column]
            stage_gains.append(total)
        return tuple(stage_gains)

    def efficiency(self, columns: Ints) -> float:
        """Return the efficiency of an assignment over all linears."""
        return ratio(sum(self.stage_gains(columns), Fraction(0)), self.max_gain)

    def stage_efficiencies(self, columns: Ints) -> tuple[float, ...]:
        """Return the efficiency of an assignment in each stage."""
        gains = self.stage_gains(columns)
        return tuple(map(ratio, gains, self.stage_max_gains))

    def quality_loss(self, columns: Ints) -> float:
        """Return the sum of quality losses, correctly rounded; NaN if one is null or padding."""
        return math.fsum(self.losses[self.rows, columns])

    def _total(self, rows: Ints, values: Sequence[Fraction]) -> Fraction:
        """Return the sum over linears of a number that depends on their class (`values`)."""
        counts = np.bincount(self.class_of[rows], minlength=len(values)).tolist()
        total = Fraction(0)
        for count, value in zip(counts, values, strict=True):
            if count:
                total += count * value
        return total

    def _integer_gains(self, groups: Sequence[Ints]) -> IntegerGains:
        """Return the gains of each group of rows in a unit of its own."""
        coefficients = np.zeros(self.listed.shape, dtype=np.int64)
        units = []
        for rows in groups:
            largest = self._total(rows, [max(each.gains) for each in self.classes])
            used = np.unique(self.class_of[rows]).tolist()
            distinct: set[Fraction] = set()
            for index in used:
                distinct.update(self.classes[index].gains)
            unit, exact = choose_unit(distinct, largest)
            # Rounding up lets each linear be counted with up to one unit too much.
            if not exact and len(rows) * unit > TOLERANCE * largest:
                raise UsageError(
                    f"{len(rows)} linears whose FLOPs share no unit cannot be planned to "
                    f"{float(TOLERANCE):g}; round the FLOPs to integers"
                )
            integers = np.zeros((len(self.classes), self.listed.shape[1]), dtype=np.int64)
            for index in used:
                gains = self.classes[index].gains
                # Up, like the floor: a sum of parts rounded up is at least their sum rounded up, so
                # no assignment that reaches the floor is lost.
                integers[index, : len(gains)] = [math.ceil(gain / unit) for gain in gains]
            coefficients[rows] = integers[self.class_of[rows]]
            units.append(unit)
        return IntegerGains(coefficients, tuple(units))


def make_table(problem: PlanningProblem, measure: EfficiencyMeasure) -> OptionTable:
    """Build the arrays of a problem.

    Args:
        problem: The linears and their options.
        measure: What the target counts.

    Raises:
        UsageError: if `time` is counted and the seconds of an option are missing.
    """
    index_of: dict[object, int] = {}
    classes: list[WorkClass] = []
    indices = []
    for linear in problem.linears:
        key = _class_key(linear, measure)
        if key not in index_of:
            index_of[key] = len(classes)
            classes.append(_work_class(linear, measure))
        indices.append(index_of[key])
    class_of = np.array(indices)

    columns = np.arange(max(len(each.options) for each in classes))
    num_listed = np.array([each.num_listed for each in classes])[class_of]
    num_columns = np.array([len(each.options) for each in classes])[class_of]
    listed = columns < num_listed[:, None]
    # The 0 stays for an unlisted bf16 alone: the losses of listed options replace the others.
    losses = np.where(columns < num_columns[:, None], 0.0, np.nan)
    for row, linear in enumerate(problem.linears):
        own = [option.quality_loss for option in linear.options.values()]
        losses[row, : len(own)] = [math.nan if loss is None else loss for loss in own]
    return OptionTable(
        problem=problem,
        classes=tuple(classes),
        class_of=class_of,
        listed=listed,
        losses=losses,
        stage=np.array([linear.stage for linear in problem.linears], dtype=np.int64),
    )


def _class_key(linear: LinearChoices, measure: EfficiencyMeasure) -> object:
    """Return what linears of one class have in common: all that `_work_class` reads."""
    options = linear.options.items()
    if measure == "flops":
        return (linear.flops, *((name, option.saving) for name, option in options))
    return tuple((name, option.seconds) for name, option in options)


def _work_class(linear: LinearChoices, measure: EfficiencyMeasure) -> WorkClass:
    options = tuple(linear.options)
    num_listed = len(options)
    if measure == "flops":
        max_gain = as_fraction(linear.flops)
        gains = [max_gain * as_fraction(option.saving) for option in linear.options.values()]
        if str(BF16) not in options:
            options = (*options, str(BF16))
            gains.append(Fraction(0))
    else:
        seconds = [_seconds(linear, name) for name in options]
        # Also of forbidden options: what a linear can save is a fact of the machine. Else an option
        # whose quality loss could not be measured would change what the target means.
        slowest = max(seconds)
        max_gain = slowest - min(seconds)
        gains = [slowest - taken for taken in seconds]
    return WorkClass(options, num_listed, max_gain, tuple(gains))


def _seconds(linear: LinearChoices, name: str) -> Fraction:
    seconds = linear.options[name].seconds
    if seconds is None:
        raise UsageError(
            f"cost 'time' needs seconds for every option, and '{linear.name}' has none for "
            f"'{name}'; give a table made by 'megatron-snip calibrate', or use cost 'flops'"
        )
    return as_fraction(seconds)
