"""FP8 as the kernels store it: one scale per tensor, per tile of 128, or per 32 values (MXFP8).

Each function fills the buffers of a quantized tensor from x [rows, columns].
"""

from typing import Any

import torch
from torch import Tensor

from tests.te_on_cpu.extension.enums import torch_dtype
from tests.te_on_cpu.extension.numbers import (
    amax_of,
    cast_fp8,
    scale_from_amax,
    spread,
    tile_amaxes,
)

FP32_MAX = torch.finfo(torch.float32).max


def fill_current_scaling(x: Tensor, quantizer: Any, out: Any) -> None:
    """Float8CurrentScalingQuantizer::quantize_impl, quantizer.cpp:980."""
    amax = amax_of(x)
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
    dtype = torch_dtype(quantizer.dtype)
    scale = scale_from_amax(
        amax,
        torch.finfo(dtype).max,
        quantizer.amax_epsilon,
        quantizer.force_pow_2_scales,
        FP32_MAX,
    )
    _store_with_one_scale(x, scale, dtype, out)


def fill_delayed_scaling(x: Tensor, quantizer: Any, out: Any) -> None:
    """Float8Quantizer::quantize, quantizer.cpp:632: by a scale of earlier steps; notes the amax."""
    noted = quantizer.amax
    if noted.numel():  # a cast of master weights by a known scale notes none
        noted.copy_(torch.maximum(noted, amax_of(x).reshape(noted.shape)))
    dtype = torch_dtype(quantizer.dtype)
    _store_with_one_scale(x, quantizer.scale.reshape(1), dtype, out)


def _store_with_one_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, out: Any) -> None:
    data = cast_fp8(x.float() * scale, dtype)
    if out._data is not None:
        out._data.view(data.shape).copy_(data)
    if out._transpose is not None:
        out._transpose.view(data.shape[1], data.shape[0]).copy_(data.t())
        out._transpose_invalid = False
    out._scale_inv.copy_(scale.reciprocal().reshape(out._scale_inv.shape))


def fill_block_scaling(x: Tensor, quantizer: Any, out: Any) -> None:
    """Float8BlockQuantizer::quantize, quantizer.cpp:1425.

    Kernels: common/transpose/quantize_transpose_vector_blockwise.cu (1x128 tiles),
    quantize_transpose_square_blockwise.cu (128x128). Columns are stored transposed; scales of 1x128
    tiles are stored transposed, too.
    """
    dtype = torch_dtype(quantizer.dtype)
    is_square = quantizer.block_scaling_dim == 2
    height = 128 if is_square else 1
    for side, matrix in (("rowwise", x), ("columnwise", x.t())):
        stored = getattr(out, f"_{side}_data")
        if stored is None:
            continue
        values = matrix.float()
        scale = scale_from_amax(
            tile_amaxes(values, height, 128),
            torch.finfo(dtype).max,
            quantizer.amax_epsilon,
            quantizer.force_pow_2_scales,
            torch.finfo(x.dtype).max,
        )
        data = cast_fp8(values * spread(scale, height, 128, values.shape), dtype)
        stored.view(data.shape).copy_(data)
        inverse = scale.reciprocal()
        _store_scales(inverse if is_square else inverse.t(), getattr(out, f"_{side}_scale_inv"))


def fill_mxfp8(x: Tensor, quantizer: Any, out: Any) -> None:
    """MXFP8Quantizer::quantize, quantizer.cpp:1835; common/cast/mxfp8/quantize_mxfp8.cuh.

    Columns are not stored transposed.
    """
    dtype = torch_dtype(quantizer.dtype)
    height = 32 if getattr(quantizer, "with_2d_quantization", False) else 1
    for side, matrix in (("rowwise", x), ("columnwise", x.t())):
        stored = getattr(out, f"_{side}_data")
        if stored is None:
            continue
        values = matrix.float()
        largest = torch.finfo(dtype).max
        bits = e8m0_rounded_up(tile_amaxes(values, height, 32) * (1.0 / largest))
        bits = bits.repeat_interleave(height, 0)
        data = cast_fp8(values / spread(e8m0_values(bits), 1, 32, values.shape), dtype)
        if side == "columnwise":
            data = data.t()
            bits = bits.t()
        stored.view(data.shape).copy_(data)
        _store_scales(bits, getattr(out, f"_{side}_scale_inv"))


def e8m0_rounded_up(value: Tensor) -> Tensor:
    """float_to_e8m0, common/util/ptx.cuh: the biased exponent of a power of two >= value."""
    mantissa, exponent = torch.frexp(value)  # value = mantissa 2^exponent, 0.5 <= mantissa < 1
    rounded = torch.where(mantissa == 0.5, exponent - 1, exponent)
    biased = (rounded + 127).clamp(0, 254)
    return torch.where(value == 0, 0, biased).to(torch.uint8)


def e8m0_values(bits: Tensor) -> Tensor:
    """Return 2^(bits - 127)."""
    return torch.ldexp(torch.ones(bits.shape), bits.int() - 127)


def _store_scales(scales: Tensor, stored: Tensor) -> None:
    """Scale buffers are padded to the tiles of cuBLAS, with zeros."""
    stored.zero_()
    stored[: scales.shape[0], : scales.shape[1]] = scales
