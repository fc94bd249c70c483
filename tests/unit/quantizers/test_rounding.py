"""Rounding, value by value against ml_dtypes; stochastic rounding over every possible draw."""

import numpy as np
import pytest
import torch

from megatron_snip.formats import E2M0, E2M1, E4M3
from megatron_snip.quantizers.rounding import round_stochastic, round_to_nearest_even
from tests.unit.quantizers import oracle

ELEMENTS = [E4M3, E2M1, E2M0]
ALL_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)


def both_signs(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([values, -values]).astype(np.float32))


def midpoints(element) -> np.ndarray:
    values = oracle.grid(element)
    return (values[1:] + values[:-1]) / 2


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_representable_value_is_kept(element):
    y = both_signs(oracle.grid(element))
    assert torch.equal(round_to_nearest_even(y, element), y)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_tie_and_its_neighbours(element):
    ties = midpoints(element)
    up, down = np.nextafter(ties, np.float32(1e9)), np.nextafter(ties, np.float32(0))
    y = both_signs(np.concatenate([ties, up, down]))
    assert oracle.same(round_to_nearest_even(y, element), oracle.round_nearest(y.numpy(), element))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_random_values_over_many_binades(element):
    rng = np.random.default_rng(0)
    y = rng.standard_normal(200_000) * np.exp2(rng.uniform(-16, 9, 200_000))
    y = both_signs(np.clip(y, -element.max_value, element.max_value))
    assert oracle.same(round_to_nearest_even(y, element), oracle.round_nearest(y.numpy(), element))


def test_ties_go_to_even():
    y = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to_nearest_even(y, E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_beyond_the_range_saturates(element):
    top = element.max_value
    y = torch.tensor([top * (1 + 2**-23), top * 1.5, 1e38, -1e38])
    bits = torch.full(y.shape, 2**15 - 1, dtype=torch.int16)
    for rounded in (round_to_nearest_even(y, element), round_stochastic(y, element, bits)):
        assert rounded.tolist() == [top, top, top, -top]


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_nan_and_inf_become_nan_and_zeros_become_plus_zero(element):
    y = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1e-30])
    for bits in (-(2**15), 0, 2**15 - 1):
        draws = torch.full(y.shape, bits, dtype=torch.int16)
        for rounded in (round_to_nearest_even(y, element), round_stochastic(y, element, draws)):
            assert rounded[:3].isnan().all()
            assert rounded[3:].tolist() == [0, 0, 0]
            assert not rounded[3:].signbit().any()


def test_the_input_is_left_alone():
    y = torch.randn(10)
    copy = y.clone()
    round_to_nearest_even(y, E4M3)
    round_stochastic(y, E4M3, ALL_BITS[:10])
    assert torch.equal(y, copy)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float32"):
        round_to_nearest_even(torch.ones(3, dtype=torch.bfloat16), E4M3)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_stochastic_keeps_grid_values_under_every_draw(element):
    y = both_signs(oracle.grid(element))
    rounded = round_stochastic(
        y[:, None].expand(-1, 2**16), element, ALL_BITS.expand(len(y), 2**16)
    )
    assert torch.equal(rounded, y[:, None].expand_as(rounded))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_stochastic_is_unbiased_over_all_draws(element):
    """The mean over all 65536 draws is y to 2^-16 of a step, and draws hit neighbours only."""
    values = oracle.grid(element)
    rng = np.random.default_rng(1)
    gaps = rng.integers(0, len(values) - 1, 48)
    lower, upper = values[gaps], values[gaps + 1]
    y = (lower + rng.uniform(0.001, 0.999, 48).astype(np.float32) * (upper - lower)).astype("f4")
    y = np.concatenate([y, -y])
    lower, upper = np.tile(lower, 2), np.tile(upper, 2)
    rounded = round_stochastic(
        torch.from_numpy(y)[:, None].expand(-1, 2**16), element, ALL_BITS.expand(len(y), 2**16)
    ).numpy()
    magnitude = np.abs(rounded)
    assert ((magnitude == lower[:, None]) | (magnitude == upper[:, None])).all()
    bias = (rounded.astype(np.float64).mean(1) - y) / (upper - lower)
    assert np.abs(bias).max() <= 2**-16
