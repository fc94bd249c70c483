"""MX and NVFP4 against torchao's quantizers, bit for bit, where torchao is installed."""

import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers.quantize import quantize_dequantize

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
mx_config = pytest.importorskip("torchao.prototype.mx_formats.config")

E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def sample(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(256, 512) * torch.exp2(torch.randint(-40, 40, (256, 1)))
    x[3] = x[3].sign() * 6 * 2.0**-4  # magnitudes on the edge of a power-of-two scale
    x[4, ::2] = 0
    return x.to(dtype)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Two values a byte, the first in the low half."""
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
    return E2M1_VALUES[codes.long()]


def scaled(values: torch.Tensor, scales: torch.Tensor, tile: int) -> torch.Tensor:
    return values * scales.view(256, -1).repeat_interleave(tile, 1)


@both_dtypes
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_mx_with_scales_rounded_up(name, dtype):
    x = sample(dtype)
    element = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
    scales, data = mx_tensor.to_mx(x, element, 32, mx_config.ScaleCalculationMode.RCEIL)
    values = data.float() if name == "mxfp8" else unpack_e2m1(data)
    exponents = scales.view(torch.uint8).to(torch.int32) - 127
    wanted = scaled(values, torch.exp2(exponents.float()), 32)
    assert torch.equal(quantize_dequantize(x, FORMATS[name], (1, 32)), wanted)


@both_dtypes
def test_nvfp4_with_two_levels_of_scales(dtype):
    x = sample(dtype)
    tensor = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max().float())
    scales, packed = nvfp4_tensor.nvfp4_quantize(x, 16, tensor)
    wanted = scaled(unpack_e2m1(packed), scales.float() * tensor, 16)
    assert torch.equal(quantize_dequantize(x, FORMATS["nvfp4"], (1, 16)), wanted)
