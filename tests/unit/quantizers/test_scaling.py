"""Scales, bit for bit, from the smallest to the largest magnitudes."""

import numpy as np
import pytest
import torch

from megatron_snip.formats import FORMATS, ScaleType
from megatron_snip.quantizers.scaling import AMAX_FLOOR, tile_scales
from tests.unit.quantizers.oracle import SCALED

SIMPLE = [f for f in SCALED if f.scale is not ScaleType.E4M3]
E8M0 = [f for f in SCALED if f.scale is ScaleType.E8M0]
NVFP4 = FORMATS["nvfp4"]


def magnitudes() -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(np.exp2(rng.uniform(-100, 127.9, 20_000)).astype(np.float32))


@pytest.mark.parametrize("fmt", SIMPLE, ids=lambda f: f.name)
def test_scales_and_inverses_are_normal_numbers(fmt):
    amax = torch.tensor([0.0, 1e-45, 1e-38, AMAX_FLOOR, 1.0, torch.finfo(torch.float32).max])
    for scale in tile_scales(amax, fmt):
        assert (scale >= torch.finfo(torch.float32).tiny).all() and scale.isfinite().all()


@pytest.mark.parametrize("name", ["fp8", "fp4", "fp3"])
def test_fp32_scales_are_correctly_rounded_quotients(name):
    fmt, amax = FORMATS[name], magnitudes()
    encode, decode = tile_scales(amax, fmt)
    exact = amax.numpy().astype(np.float64)  # a double quotient rounds once more, harmlessly here
    assert np.array_equal(decode.numpy(), (exact / fmt.element.max_value).astype("f4"))
    assert np.array_equal(encode.numpy(), (fmt.element.max_value / exact).astype("f4"))


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


def test_e4m3_scales_use_the_full_range_under_the_tensor_scale():
    top = torch.tensor(30.0)
    _, decode = tile_scales(torch.tensor([30.0, 15.0, 30 / 448 * 2**-6, 0.0]), NVFP4, top)
    tensor = top / (448 * 6)
    assert torch.equal(decode, torch.tensor([448.0, 224.0, 2**-6, 2**-6]) * tensor)


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
def test_nan_and_inf_poison_the_scale(fmt):
    for scale in tile_scales(torch.tensor([np.nan, np.inf, 1.0]), fmt, torch.tensor(1.0)):
        assert scale.isnan().tolist() == [True, True, False]


def test_missing_arguments_are_refused():
    with pytest.raises(ValueError, match="not quantized"):
        tile_scales(torch.ones(1), FORMATS["bf16"])
    with pytest.raises(ValueError, match="amax"):
        tile_scales(torch.ones(1), NVFP4)
