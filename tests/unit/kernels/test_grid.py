"""The constants that kernels round with are those of the reference."""

import pytest

from megatron_snip.formats import FORMATS
from megatron_snip.kernels.grid import make_grid
from megatron_snip.quantizers import rounding


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.quantized], ids=lambda f: f.name)
def test_constants(fmt):
    grid = make_grid(fmt, (3, 5))
    assert grid.largest == fmt.element.max_value
    assert grid.least_bits == rounding.least_power_bits(fmt.element)
    assert grid.anchor == rounding.anchor_factor(fmt.element)
    assert grid.noise == rounding.noise_factor(fmt.element)
    assert (grid.tile_rows, grid.tile_cols) == (3, 5)
