from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from megatron_snip.planning.cost import TOLERANCE, as_fraction
from megatron_snip.planning.scaling import MAX_SUM, choose_scale


def test_flop_counts_and_thirds_scale_exactly_to_small_integers() -> None:
    flops = [6 * 8192 * 8192, 6 * 8192 * 28672]
    values = [Fraction(f) * as_fraction(s) for f in flops for s in (0.0, 1 / 3, 2 / 3, 1.0)]
    scale = choose_scale(values, Fraction(sum(flops)) * 80)
    assert scale.exact
    assert [scale.coefficient(value) for value in values] == [0, 2, 4, 6, 0, 7, 14, 21]
    assert scale.error(10**6) == 0


def test_zero_gains_have_a_scale() -> None:
    scale = choose_scale([Fraction(0)], Fraction(0))
    assert scale.coefficient(Fraction(0)) == scale.threshold(Fraction(0)) == 0


finite = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=40), st.floats(min_value=0.0, max_value=1.0))
def test_rounding_never_loses_a_plan_and_misses_by_no_more_than_stated(
    floats: list[float], share: float
) -> None:
    gains = [as_fraction(value) for value in floats]
    total = sum(gains, Fraction(0))
    scale = choose_scale(gains, total)
    least = total * Fraction(share)
    chosen = gains[: max(1, len(gains) // 2)]
    accepted = sum(map(scale.coefficient, chosen)) >= scale.threshold(least)
    if sum(chosen) >= least:
        assert accepted
    if accepted:
        assert least - sum(chosen) <= scale.error(len(gains))
    assert sum(map(scale.coefficient, gains)) <= MAX_SUM + len(gains)


def test_the_error_of_the_largest_models_is_within_the_tolerance() -> None:
    total = Fraction(1)
    scale = choose_scale([Fraction(1, 3**60), Fraction(1, 2**90)], total)
    assert not scale.exact
    assert scale.error(2**16) <= TOLERANCE * total
