"""Efficiencies are exact fractions, and the solver's integers follow them."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_snip.errors import UsageError
from megatron_snip.planning.option_table import (
    MAX_SUM,
    TOLERANCE,
    as_fraction,
    choose_unit,
    make_table,
)
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import options_of, problem_of

FINITE = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)


def test_the_efficiency_of_linears_with_different_options_is_exact() -> None:
    first = {
        "fp8": OptionCost(quality_loss=0.5, saving=0.0),
        "fp4": OptionCost(quality_loss=None, saving=1.0),
        "fp4-fp8-fp8": OptionCost(quality_loss=1.0, saving=1 / 3),
    }
    second = {"fp4": OptionCost(quality_loss=2.0, saving=1.0)}
    a = LinearChoices(name="a", stage=0, flops=3.0, options=first)
    b = LinearChoices(name="b", stage=2, flops=1.0, options=second)
    plan = make_plan(PlanningProblem(linears=(a, b), target=0.5), PlanSettings())
    assert options_of(plan) == ["fp4-fp8-fp8", "fp4"]
    assert (plan.efficiency, plan.objective) == (0.5, 3.0)  # (3 / 3 + 1) / 4
    assert plan.stages == (1 / 3, 1.0, 1.0)  # stage 1 has no work


def test_time_needs_the_seconds_of_every_option() -> None:
    for pins in ((), (("*", "bf16"),)):
        with pytest.raises(UsageError, match="calibrate"):
            make_plan(problem_of([[0.0, 1.0]]), PlanSettings(cost="time", pins=pins))


@given(st.lists(FINITE, min_size=1, max_size=40), st.floats(min_value=0.0, max_value=1.0))
def test_rounding_to_integers_loses_no_plan_and_accepts_none_far_below(
    floats: list[float], share: float
) -> None:
    gains = [as_fraction(value) for value in floats]
    total = sum(gains, Fraction(0))
    unit, exact = choose_unit(gains, total)
    least = total * Fraction(share)
    chosen = gains[: max(1, len(gains) // 2)]
    accepted = sum(-(-gain // unit) for gain in chosen) >= -(-least // unit)
    if sum(chosen) >= least:
        assert accepted
    if accepted:
        assert least - sum(chosen) <= (0 if exact else len(gains) * unit)
    assert sum(-(-gain // unit) for gain in gains) <= MAX_SUM + len(gains)


def test_the_units_of_real_models_are_exact_and_others_within_the_tolerance() -> None:
    flops = [6 * 8192 * 8192, 6 * 8192 * 28672]
    values = [Fraction(f) * as_fraction(s) for f in flops for s in (0.0, 1 / 3, 2 / 3, 1.0)]
    unit, exact = choose_unit(values, Fraction(sum(flops)) * 80)
    assert exact and [value / unit for value in values] == [0, 2, 4, 6, 0, 7, 14, 21]
    unit, exact = choose_unit([Fraction(1, 3**60), Fraction(1, 2**90)], Fraction(1))
    assert not exact and 2**16 * unit <= TOLERANCE


def test_problems_that_integers_cannot_express_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_snip.planning.option_table.MAX_SUM", 2**20)
    odd = problem_of([[0.0, 1.0]] * 3, flops=[np.pi, np.e, 2.0**0.5])
    with pytest.raises(UsageError, match="share no unit"):
        _ = make_table(odd, "flops").integer_gains
