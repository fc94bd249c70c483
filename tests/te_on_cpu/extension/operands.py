"""What a tensor's buffers stand for: the FP32 matrix that a GEMM multiplies."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.te_on_cpu.extension.enums import torch_dtype
from tests.te_on_cpu.extension.fp8 import e8m0_values
from tests.te_on_cpu.extension.machine import has_non_tn_fp8_gemm
from tests.te_on_cpu.extension.numbers import check, fp4_values, spread, unpacked

FORMATS = ("Float8Block", "MXFP8", "NVFP4", "Float8")
"""How the names of classes of quantized tensors begin."""


def format_of(tensor: Any) -> str:
    """Return which of `FORMATS` a tensor is in, or an empty text if it is not quantized."""
    return next((name for name in FORMATS if type(tensor).__name__.startswith(name)), "")


def values_of(tensor: Any, columnwise: bool) -> Tensor:
    """Return [rows, columns] in FP32: as quantized along rows, or along columns.

    Raises:
        RuntimeError: if the tensor does not hold that.
    """
    kind = format_of(tensor)
    if not kind:
        return tensor.detach().reshape(-1, tensor.shape[-1]).float()
    if kind == "Float8":
        return _with_one_scale(tensor, columnwise)
    side = "columnwise" if columnwise else "rowwise"
    data = getattr(tensor, f"_{side}_data")
    scales = getattr(tensor, f"_{side}_scale_inv")
    check(data is not None, f"{type(tensor).__name__} has no {side} data")
    if data.numel() == 0:
        shape = tuple(tensor.size())
        return torch.zeros(math.prod(shape[:-1]), shape[-1])
    if kind == "MXFP8":
        return _mxfp8(tensor, data, scales, columnwise)
    # Columns are stored transposed: their first dimension is the tensor's last.
    flat = data.reshape(data.shape[0], -1) if columnwise else data.reshape(-1, data.shape[-1])
    decode = _nvfp4 if kind == "NVFP4" else _block_scaled
    values = decode(tensor, flat, scales, side)
    return values.t() if columnwise else values


def _with_one_scale(tensor: Any, columnwise: bool) -> Tensor:
    dtype = torch_dtype(tensor._fp8_dtype)
    if not columnwise or has_non_tn_fp8_gemm():
        check(tensor._data is not None, "Float8Tensor has no data")
        data = tensor._data.reshape(-1, tensor._data.shape[-1])
        return data.view(dtype).float() * tensor._scale_inv
    is_valid = tensor._transpose is not None and not tensor._transpose_invalid
    check(is_valid, "Float8Tensor has no transpose")
    transpose = tensor._transpose.reshape(tensor._transpose.shape[0], -1)
    return transpose.view(dtype).float().t() * tensor._scale_inv


def _mxfp8(tensor: Any, data: Tensor, scales: Tensor, columnwise: bool) -> Tensor:
    flat = data.reshape(-1, data.shape[-1]).view(torch_dtype(tensor._fp8_dtype)).float()
    tile = (32, 1) if columnwise else (1, 32)
    return flat * spread(e8m0_values(scales), *tile, flat.shape)


def _block_scaled(tensor: Any, data: Tensor, scales: Tensor, side: str) -> Tensor:
    values = data.view(torch_dtype(tensor._fp8_dtype)).float()
    if tensor._is_2D_scaled:
        return values * spread(scales, 128, 128, values.shape)
    return values * spread(scales.t(), 1, 128, values.shape)


def _nvfp4(tensor: Any, data: Tensor, scales: Tensor, side: str) -> Tensor:
    """common/cast/nvfp4/dequantize_nvfp4.cuh:69."""
    values = fp4_values(unpacked(data))
    amax = getattr(tensor, f"_amax_{side}").reshape(-1, 1)  # of the tensor, or of each row
    factor = 1.0 / (6.0 * getattr(tensor, "_nvfp4_e4m3_max", 448))
    tiles = spread(scales.view(torch.float8_e4m3fn).float(), 1, 16, values.shape)
    return values * (tiles * amax * torch.tensor(factor))
