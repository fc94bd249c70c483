"""Scales and rounding, value by value; stochastic rounding over every possible draw."""

import numpy as np
import pytest
import torch

from megatron_snip.formats import E2M0, E2M1, E4M3, ScaleType
from megatron_snip.quantizers.reference import round_in_place, tile_scales
from tests.unit.quantizers import oracle
from tests.unit.quantizers.oracle import SCALED

E8M0 = [f for f in SCALED if f.scale is ScaleType.E8M0]
ALL_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)

each_element = pytest.mark.parametrize("element", [E4M3, E2M1, E2M0], ids=lambda e: e.name)


def magnitudes() -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(np.exp2(rng.uniform(-100, 127.9, 20_000)).astype(np.float32))


@pytest.mark.parametrize("fmt", E8M0, ids=lambda f: f.name)
def test_e8m0_is_the_smallest_power_of_two_that_does_not_overflow(fmt):
    exact = fmt.element.max_value * np.exp2(np.arange(-90, 100, dtype=np.float64))
    edge = torch.from_numpy(exact.astype(np.float32))
    above = torch.nextafter(edge, torch.tensor(np.inf))
    amax = torch.cat([magnitudes(), edge, above])
    encode, decode = (scale.double() for scale in tile_scales(amax, fmt))
    assert (torch.frexp(decode).mantissa == 0.5).all() and (encode * decode == 1).all()
    assert (amax.double() <= decode * fmt.element.max_value).all()
    assert (amax.double() > decode / 2 * fmt.element.max_value).all()


def both_signs(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([values, -values]).astype(np.float32))


def rounded(y: torch.Tensor, element, bits16: torch.Tensor | None = None) -> torch.Tensor:
    q = y.clamp(-element.max_value, element.max_value).contiguous()
    round_in_place(q, element, torch.empty_like(q, dtype=torch.int32), bits16)
    return q


@each_element
def test_grid_values_ties_their_neighbors_and_random_values(element):
    grid = oracle.grid(element)
    ties = (grid[1:] + grid[:-1]) / 2
    up, down = np.nextafter(ties, np.float32(1e9)), np.nextafter(ties, np.float32(0))
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(200_000) * np.exp2(rng.uniform(-16, 9, 200_000))
    y = both_signs(np.concatenate([grid, ties, up, down, drawn]))
    assert oracle.same(rounded(y, element), oracle.round_nearest(y.numpy(), element))


@each_element
@pytest.mark.parametrize("bits", [None, -(2**15), 0, 2**15 - 1])
def test_the_largest_value_nan_and_zeros(element, bits):
    top = element.max_value
    y = torch.tensor([top, -top, float("nan"), 0.0, -0.0, -1e-30])
    draws = None if bits is None else torch.full(y.shape, bits, dtype=torch.int16)
    first, second, nan, *zeros = rounded(y, element, draws)
    assert (first, second) == (top, -top) and nan.isnan()
    assert not any(zero or zero.signbit() for zero in zeros)


def over_all_draws(y: torch.Tensor, element) -> torch.Tensor:
    shape = (len(y), 2**16)
    return rounded(y[:, None].expand(shape), element, ALL_BITS.expand(shape))


@each_element
def test_stochastic_rounding_is_unbiased_over_all_draws(element):
    """The mean over all 65536 draws is y to 2^-16 of a step, and draws hit neighbors only."""
    values = oracle.grid(element)
    y = both_signs(values)
    assert (over_all_draws(y, element) == y[:, None]).all()  # grid values do not change
    rng = np.random.default_rng(1)
    gaps = rng.integers(0, len(values) - 1, 48)
    lower, upper = values[gaps], values[gaps + 1]
    y = (lower + rng.uniform(0.001, 0.999, 48).astype(np.float32) * (upper - lower)).astype("f4")
    lower, upper = np.tile(lower, 2), np.tile(upper, 2)
    drawn = over_all_draws(both_signs(y), element).numpy()
    magnitude = np.abs(drawn)
    assert ((magnitude == lower[:, None]) | (magnitude == upper[:, None])).all()
    bias = (drawn.astype(np.float64).mean(1) - both_signs(y).numpy()) / (upper - lower)
    assert np.abs(bias).max() <= 2**-16
