"""Rounding, value by value; stochastic rounding over every possible draw."""

import numpy as np
import pytest
import torch

from megatron_snip.formats import E2M0, E2M1, E4M3
from megatron_snip.quantizers.reference import round_in_place
from tests.unit.quantizers import oracle

ALL_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)

each_element = pytest.mark.parametrize("element", [E4M3, E2M1, E2M0], ids=lambda e: e.name)


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
