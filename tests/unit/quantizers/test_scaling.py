"""Scales, bit for bit, from the smallest to the largest magnitudes."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_snip.formats import FORMATS, ScaleType
from megatron_snip.quantizers.scaling import AMAX_FLOOR, stored_scales, tensor_scale, tile_scales

SCALED = [f for f in FORMATS.values() if f.quantized]
SIMPLE = [f for f in SCALED if f.scale is not ScaleType.E4M3]


def magnitudes() -> torch.Tensor:
    rng = np.random.default_rng(0)
    values = np.exp2(rng.uniform(-100, 127.9, 20_000)).astype(np.float32)
    return torch.from_numpy(values)


@pytest.mark.parametrize("fmt", SIMPLE, ids=lambda f: f.name)
def test_scales_and_inverses_are_normal_numbers(fmt):
    amax = torch.tensor([0.0, 1e-45, 1e-38, AMAX_FLOOR, 1.0, torch.finfo(torch.float32).max])
    scales = tile_scales(amax, fmt)
    for scale in (scales.encode, scales.decode):
        assert (scale >= torch.finfo(torch.float32).tiny).all() and scale.isfinite().all()


@pytest.mark.parametrize("name", ["fp8", "fp4", "fp3"])
def test_fp32_scales_are_correctly_rounded_quotients(name):
    fmt, amax = FORMATS[name], magnitudes()
    scales = tile_scales(amax, fmt)
    exact = amax.numpy().astype(np.float64)  # a double quotient rounds once more, harmlessly here
    assert np.array_equal(scales.decode.numpy(), (exact / fmt.element.max_value).astype("f4"))
    assert np.array_equal(scales.encode.numpy(), (fmt.element.max_value / exact).astype("f4"))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_e8m0_is_the_least_power_of_two_that_does_not_overflow(name):
    fmt = FORMATS[name]
    exact = fmt.element.max_value * np.exp2(np.arange(-90, 100, dtype=np.float64))
    edge = torch.from_numpy(exact.astype(np.float32))
    above = torch.nextafter(edge, torch.tensor(np.inf))
    amax = torch.cat([magnitudes(), edge, above])
    decode = tile_scales(amax, fmt).decode.double()
    assert (torch.frexp(decode).mantissa == 0.5).all()
    assert (amax.double() <= decode * fmt.element.max_value).all()
    assert (amax.double() > decode / 2 * fmt.element.max_value).all()
    assert torch.equal(
        tile_scales(edge, fmt).decode.double(), edge.double() / fmt.element.max_value
    )


def test_power_of_two_scales_for_any_format():
    fmt = dataclasses.replace(FORMATS["fp8"], scale=ScaleType.E8M0)
    scales = tile_scales(torch.tensor([448.0, 449.0, 1.0]), fmt)
    assert scales.decode.tolist() == [1.0, 2.0, 2**-8]


def test_e4m3_scales_use_the_whole_range_under_the_tensor_scale():
    fmt, top = FORMATS["nvfp4"], torch.tensor(30.0)
    amax = torch.tensor([30.0, 15.0, 30 / 448 * 2**-6, 0.0])
    scales = tile_scales(amax, fmt, top)
    stored = stored_scales(scales.decode, fmt, top)
    assert stored.tolist() == [448.0, 224.0, 2**-6, 2**-6]
    assert torch.equal(scales.decode, stored * tensor_scale(top, fmt.element))


def test_stored_scales_are_recovered_over_the_whole_range():
    fmt, amax = FORMATS["nvfp4"], magnitudes()
    for top in (1e-20, 0.37, 3.3e38):
        tensor_amax = torch.tensor(top)
        inside = amax[amax <= tensor_amax]
        decode = tile_scales(inside, fmt, tensor_amax).decode
        stored = stored_scales(decode, fmt, tensor_amax)
        assert torch.equal(stored, stored.to(torch.float8_e4m3fn).float())
        assert torch.equal(stored * tensor_scale(tensor_amax, fmt.element), decode)


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
def test_nan_and_inf_poison_the_scale(fmt):
    scales = tile_scales(torch.tensor([float("nan"), float("inf"), 1.0]), fmt, torch.tensor(1.0))
    for scale in (scales.encode, scales.decode):
        assert scale.isnan().tolist() == [True, True, False]


def test_missing_pieces_are_refused():
    with pytest.raises(ValueError, match="not quantized"):
        tile_scales(torch.ones(1), FORMATS["bf16"])
    with pytest.raises(ValueError, match="amax"):
        tile_scales(torch.ones(1), FORMATS["nvfp4"])
