"""From exact gains to the integers that CP-SAT needs, with a stated error.

A row of the model says sum_l gain[l, x_l] >= least. With a unit u its integers are

    exact:    coefficient = gain / u             if one u divides all gains and the integers stay
              below 2^46 in total (FLOP counts and thirds of them always do in practice): no error
    rounded:  coefficient = ceil(gain / u)       with u = (largest possible sum) / 2^46

and the right-hand side is ceil(least / u). Rounding up never loses a plan that reaches `least`; a
plan that the row accepts misses it by less than (number of linears) * u, which is checked to be
at most `cost.TOLERANCE` of the row's weight (64 thousand linears: 2^16 / 2^46 < 1e-9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MAX_SUM = 2**46
"""Sums of a row's integers stay below this (plus rounding): exact in int64 and in a double."""

_MAX_UNIT_DENOMINATOR = 2**80

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Scale:
    """How the gains of one row become integers.

    Attributes:
        unit: gain per integer step.
        exact: whether every gain is a whole number of units.
    """

    unit: Fraction
    exact: bool

    def coefficient(self, gain: Fraction) -> int:
        """Return the integer of a gain (rounded up where it is not exact)."""
        return math.ceil(gain / self.unit)

    def threshold(self, least: Fraction) -> int:
        """Return the right-hand side of `sum of gains >= least`."""
        return math.ceil(least / self.unit)

    def error(self, num_linears: int) -> Fraction:
        """Return how far below `least` an accepted sum of gains can be."""
        return Fraction(0) if self.exact else num_linears * self.unit


def choose_scale(values: Sequence[Fraction], largest_sum: Fraction) -> Scale:
    """Return the scale for a row.

    Args:
        values: the distinct gains that occur in the row.
        largest_sum: bound on the sum of magnitudes that any assignment can reach.
    """
    nonzero = [value for value in values if value]
    if not nonzero or not largest_sum:
        return Scale(Fraction(1), exact=True)
    unit = _common_unit(nonzero)
    if unit is not None and largest_sum / unit <= MAX_SUM:
        return Scale(unit, exact=True)
    return Scale(largest_sum / MAX_SUM, exact=False)


def _common_unit(values: Sequence[Fraction]) -> Fraction | None:
    """Return the greatest rational that divides all values; None if it is hopelessly small."""
    denominator = 1
    for value in values:
        denominator = math.lcm(denominator, value.denominator)
        if denominator > _MAX_UNIT_DENOMINATOR:
            return None
    numerator = 0
    for value in values:
        numerator = math.gcd(numerator, value.numerator * (denominator // value.denominator))
    return Fraction(numerator, denominator)
