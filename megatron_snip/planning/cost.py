"""What efficiency means. This is the one place that says so; two models share one interface.

For linear l and option q:

    weight[l]    what the linear could save at most
    gain[l, q]   what it saves under q
    efficiency of an assignment x  =  sum_l gain[l, x_l] / sum_l weight[l]

`flops` (arXiv:2602.01410, Sec. 5): the fraction of linear FLOPs in the lowest precision:

    weight = flops        gain = flops * saving        time = flops - gain / 2

(the lowest precision is taken to run twice as fast as what it replaces; the time, in FLOPs, serves
to find the slowest pipeline stage and nothing else).

`time`: seconds saved as a share of the seconds that can be saved, from a measured table:

    weight = slowest - fastest      gain = slowest - seconds      time = slowest - gain

with slowest and fastest taken over all options in the problem, forbidden ones included. So 0 is
every linear at its slowest option, 1 every linear at its fastest.

In both, time = base - rate * gain, with rate 1/2 or 1. Work that is zero in total is saved in
full: its efficiency is 1. All sums are exact (rational arithmetic), and the efficiency is rounded
to a double once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from megatron_snip.errors import UsageError
from megatron_snip.planning.problem import LinearChoices, OptionCost

TOLERANCE = Fraction(1, 10**9)
"""An accepted plan's efficiency is never further below its target than this. It covers NOISE and
the integer scaling of gains (`planning/scaling.py`)."""

NOISE = Fraction(1, 10**12)
"""Efficiencies this close to the target count as having reached it: what the floating-point
numbers in a problem (thirds, targets like 0.15000000000000002) may be off."""

_SIMPLE_DENOMINATOR = 64


@lru_cache(maxsize=65536)
def as_fraction(value: float) -> Fraction:
    """Return the number that a double stands for: k/d with d <= 64 if it rounds to it, else itself.

    Thirds (one GEMM of three in the lowest precision) are so added without rounding.
    """
    simple = Fraction(value).limit_denominator(_SIMPLE_DENOMINATOR)
    return simple if float(simple) == value else Fraction(value)


@dataclass(frozen=True, eq=False)
class LinearWork:
    """A linear's work under a cost model; see the file's equations.

    Attributes:
        base: time if nothing is saved.
        weight: largest possible gain.
        gains: by option name, for every option in the problem.
        unlisted_bf16: gain of bf16 where the problem does not list it; None if unknown.
    """

    base: Fraction
    weight: Fraction
    gains: dict[str, Fraction]
    unlisted_bf16: Fraction | None


@dataclass(frozen=True)
class CostModel:
    """One definition of weight, gain and time.

    Attributes:
        name: `flops` or `time`.
        rate: time saved per gain.
        work: weight and gains of one linear; raises UsageError if the problem lacks numbers.
    """

    name: str
    rate: Fraction
    work: Callable[[LinearChoices], LinearWork]


@lru_cache(maxsize=65536)
def _flops_and_savings(flops: float, savings: tuple[tuple[str, float], ...]) -> LinearWork:
    """Linears of equal shape share one record, which saves most of a large model's arithmetic."""
    exact = as_fraction(flops)
    gains = {name: exact * as_fraction(saving) for name, saving in savings}
    return LinearWork(exact, exact, gains, Fraction(0))


def _flops_work(linear: LinearChoices) -> LinearWork:
    savings = tuple((name, cost.saving) for name, cost in linear.options.items())
    return _flops_and_savings(linear.flops, savings)


def _seconds(linear: LinearChoices, name: str, cost: OptionCost) -> Fraction:
    if cost.seconds is None:
        raise UsageError(
            f"cost 'time' needs seconds for every option, and '{linear.name}' has none for "
            f"'{name}'; give a table made by 'megatron-snip calibrate', or use cost 'flops'"
        )
    return as_fraction(cost.seconds)


def _time_work(linear: LinearChoices) -> LinearWork:
    seconds = {name: _seconds(linear, name, cost) for name, cost in linear.options.items()}
    slowest = max(seconds.values())
    gains = {name: slowest - taken for name, taken in seconds.items()}
    return LinearWork(slowest, slowest - min(seconds.values()), gains, None)


COST_MODELS: dict[str, CostModel] = {
    "flops": CostModel("flops", Fraction(1, 2), _flops_work),
    "time": CostModel("time", Fraction(1), _time_work),
}
"""Every cost model by name."""


def ratio(gained: Fraction, weight: Fraction) -> float:
    """Return the efficiency of a part: gained / weight, and 1 where there is no work."""
    return float(gained / weight) if weight else 1.0
