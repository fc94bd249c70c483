"""Quantizing: new quantized tensors, and buffers of given ones filled again.

A quantizer is Transformer Engine's Python object; so is the quantized tensor that it describes.
"""

import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.te_on_cpu.extension.enums import torch_dtype
from tests.te_on_cpu.extension.fp8 import (
    fill_block_scaling,
    fill_current_scaling,
    fill_delayed_scaling,
    fill_mxfp8,
)
from tests.te_on_cpu.extension.machine import has_non_tn_fp8_gemm
from tests.te_on_cpu.extension.numbers import check
from tests.te_on_cpu.extension.nvfp4 import fill_nvfp4
from tests.te_on_cpu.extension.operands import values_of

_FILL = {
    "Float8CurrentScalingQuantizer": fill_current_scaling,
    "Float8Quantizer": fill_delayed_scaling,
    "Float8BlockQuantizer": fill_block_scaling,
    "MXFP8Quantizer": fill_mxfp8,
    "NVFP4Quantizer": fill_nvfp4,
}
_MULTIPLES = {"MXFP8Quantizer": ("MXFP8", 32), "NVFP4Quantizer": ("NVFP4", 16)}
_SIDES = ("rowwise", "columnwise")
_STORAGE = "transformer_engine.pytorch.tensor.storage"
"""Not there before 2.9."""
_HAS_ONE_SCALE = ("Float8CurrentScalingQuantizer", "Float8Quantizer")


def _kind(quantizer: Any) -> str:
    """The quantizer's class in C++ (convert_quantizer, common.cpp)."""
    names = [cls.__name__ for cls in type(quantizer).__mro__]
    found = next((name for name in names if name in _FILL), "")
    check(bool(found), f"Unexpected type for quantizer: {names[0]}")
    return found


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: Any = None,
    pin_memory: bool = False,
) -> Any:
    """cast.cpp:138; create_tensor in quantizer.cpp:344, 670, 1061, 1502, 1968."""
    shape = tuple(shape)
    if not _allocates(quantizer) and _kind(quantizer) not in _HAS_ONE_SCALE:
        return _made_empty(quantizer, shape, dtype)
    buffers = _new_buffers(quantizer, shape)
    if _kind(quantizer) in _HAS_ONE_SCALE:
        return _tensor_of_one_scale(quantizer, buffers, shape, dtype)
    metadata = quantizer.create_metadata(shape, dtype=dtype)
    return metadata["cls"].__tensor_unflatten__(buffers, metadata, shape, None)


def _new_buffers(quantizer: Any, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return what the quantizer's usages need, by the tensor's attributes."""
    kind = _kind(quantizer)
    num_columns = shape[-1]
    num_rows = math.prod(shape[:-1])
    if kind in _HAS_ONE_SCALE:
        return _buffers_of_one_scale(quantizer, shape)
    if kind in _MULTIPLES:
        name, multiple = _MULTIPLES[kind]
        check(
            num_rows % multiple == 0 and num_columns % multiple == 0,
            f"{name} requires tensor dims that are divisible by {multiple} (got shape={shape})",
        )
    if not _allocates(quantizer):
        made = _made_empty(quantizer, shape, torch.bfloat16)
        names = [f"_{side}_{name}" for side in _SIDES for name in ("data", "scale_inv")]
        names += [f"_amax_{side}" for side in _SIDES if hasattr(made, f"_amax_{side}")]
        found = {name: getattr(made, name) for name in names}
        return {name: buffer for name, buffer in found.items() if buffer is not None}
    buffers: dict[str, Tensor] = quantizer.alloc_tensors(shape, device=torch.device("cpu"))
    if kind == "NVFP4Quantizer" and quantizer.columnwise_usage:
        # Two dimensions: with a batch of 1, half of the last dimension would be 0.
        half = (num_columns, num_rows // 2)
        buffers["_columnwise_data"] = torch.empty(half, dtype=torch.uint8)
        is_row_scaled = getattr(quantizer, "row_scaled_nvfp4", False)
        buffers["_amax_columnwise"] = torch.empty(num_columns if is_row_scaled else 1)
    return buffers


def _allocates(quantizer: Any) -> bool:
    """Whether the release has what the C++ of 2.20 calls; in older ones C++ made all buffers."""
    return hasattr(quantizer, "alloc_tensors")


def _made_empty(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """In a release before 2.20: a tensor with autograd also where C++ makes its base class."""
    made = quantizer.make_empty(shape, dtype=dtype, device=torch.device("cpu"))
    for side, is_used in zip(
        _SIDES, (quantizer.rowwise_usage, quantizer.columnwise_usage), strict=True
    ):
        if not is_used:  # the oldest always allocate rows
            setattr(made, f"_{side}_data", None)
            setattr(made, f"_{side}_scale_inv", None)
    return made


def _buffers_of_one_scale(quantizer: Any, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Where FP8 GEMMs take any layout, there is no transpose, and always data."""
    buffers = {"_scale_inv": torch.empty(1)}
    if quantizer.rowwise_usage or has_non_tn_fp8_gemm():
        buffers["_data"] = torch.empty(shape, dtype=torch.uint8)
    if quantizer.columnwise_usage and not has_non_tn_fp8_gemm():
        transposed = (shape[-1], *shape[:-1])
        buffers["_transpose"] = torch.empty(transposed, dtype=torch.uint8)
    return buffers


def _tensor_of_one_scale(
    quantizer: Any, buffers: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    values = {
        "data": buffers.get("_data"),
        "data_transpose": buffers.get("_transpose"),
        "fp8_scale_inv": buffers["_scale_inv"],
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal and importlib.util.find_spec(_STORAGE):
        storage = importlib.import_module(f"{_STORAGE}.float8_tensor_storage")
        return storage.Float8TensorStorage(**values, fake_dtype=dtype)
    return Float8Tensor(shape=shape, dtype=dtype, **values)


def _update_buffers(quantizer: Any, output: Any, shape: tuple[int, ...]) -> None:
    """convert_and_update_tensor, quantizer.cpp:541, 888, 1282, 1725, 2273.

    Buffers that the quantizer's usages need are made where they lack; others are dropped.
    """
    buffers = _new_buffers(quantizer, shape)
    if _kind(quantizer) in _HAS_ONE_SCALE:
        held = ["_data", "_transpose"]
        output._transpose_invalid = "_transpose" not in buffers
    else:
        held = [f"_{side}_{name}" for side in _SIDES for name in ("data", "scale_inv")]
    if _kind(quantizer) == "NVFP4Quantizer":
        held += [f"_amax_{side}" for side in _SIDES]
    for name in held:
        wanted = buffers.get(name)
        if wanted is None or getattr(output, name) is None:
            setattr(output, name, wanted)


@torch.no_grad()
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """cast.cpp:55."""
    if quantizer is None:
        return tensor
    x = tensor.detach().contiguous()
    if output is None:
        output = create_empty_quantized_tensor(quantizer, x.shape, x.dtype)
    else:
        _update_buffers(quantizer, output, tuple(x.shape))
    is_noop = noop is not None and bool(noop.item())
    if x.numel() and not is_noop:
        _FILL[_kind(quantizer)](x.reshape(-1, x.shape[-1]), quantizer, output)
    return output


@torch.no_grad()
def dequantize(input: Any, otype: int) -> Tensor:
    """cast.cpp:720; kernels in common/cast/*/dequantize_*.cuh.

    Raises:
        NotImplementedError: for NVFP4 that has columns alone, as the kernels do.
    """
    has_rows = any(getattr(input, n, None) is not None for n in ("_data", "_rowwise_data"))
    if not has_rows and hasattr(input, "_amax_columnwise"):
        raise NotImplementedError("Dequantizing column-wise NVFP4 data is not implemented yet!")
    shape = tuple(input.size())
    return values_of(input, columnwise=not has_rows).reshape(shape).to(torch_dtype(otype))


def multi_tensor_quantize(tensor_list: Sequence[Tensor], quantizer_list: Sequence[Any]) -> Any:
    """cast.cpp:1077."""
    return [quantize(t, q) for t, q in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> Any:
    """cast.cpp:2027: rows dealt out to the quantizers in order."""
    sizes = [int(size) for size in split_sections]
    return multi_tensor_quantize(torch.split(tensor[: sum(sizes)], sizes), quantizer_list)


def bgrad_quantize(input: Tensor, quantizer: Any) -> Any:
    """bias.cpp:22: the gradient of a bias, and the quantized input."""
    bias = input.detach().reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype)
    return bias, quantize(input, quantizer)
