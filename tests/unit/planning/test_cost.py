from fractions import Fraction

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning.cost import COST_MODELS, as_fraction, ratio
from megatron_snip.planning.problem import LinearChoices, OptionCost


def linear(seconds: bool = True) -> LinearChoices:
    options = {
        "fp8": OptionCost(quality_loss=0.0, saving=0.0, seconds=0.75 if seconds else None),
        "fp4-fp8-fp8": OptionCost(quality_loss=None, saving=1 / 3, seconds=0.5),
        "fp4": OptionCost(quality_loss=1.0, saving=1.0, seconds=0.25),
    }
    return LinearChoices(name="l", stage=0, flops=12.0, options=options)


def test_a_double_near_a_simple_fraction_stands_for_it() -> None:
    assert as_fraction(1 / 3) == Fraction(1, 3)
    assert as_fraction(0.1) == Fraction(1, 10)
    assert as_fraction(6.0e12) == 6 * 10**12
    assert as_fraction(0.3333) == Fraction(0.3333)  # 3333/10000 is not simple: taken as it is
    assert as_fraction(1 / 3) * 3 == 1


def test_flops_counts_the_share_in_the_lowest_precision() -> None:
    work = COST_MODELS["flops"].work(linear())
    assert work.weight == work.base == 12
    assert list(work.gains.values()) == [0, 4, 12]
    assert work.unlisted_bf16 == 0
    # The lowest precision is taken to be twice as fast.
    assert work.base - COST_MODELS["flops"].rate * work.gains["fp4"] == 6


def test_time_counts_seconds_saved_against_the_slowest_option() -> None:
    work = COST_MODELS["time"].work(linear())
    assert work.weight == Fraction(1, 2)  # 0.75 - 0.25, the forbidden option included
    assert list(work.gains.values()) == [0, Fraction(1, 4), Fraction(1, 2)]
    assert work.base - COST_MODELS["time"].rate * work.gains["fp4"] == Fraction(1, 4)
    assert work.unlisted_bf16 is None


def test_time_needs_seconds_everywhere() -> None:
    with pytest.raises(UsageError, match="calibrate") as caught:
        COST_MODELS["time"].work(linear(seconds=False))
    assert "'fp8'" in str(caught.value)


def test_no_work_is_saved_in_full() -> None:
    assert ratio(Fraction(0), Fraction(0)) == 1.0
    assert ratio(Fraction(1), Fraction(4)) == 0.25
