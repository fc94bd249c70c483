"""Operands of all experts in one storage (GroupedTensorStorage), and their GEMMs.

The storage has the buffers that the kernels fill, one expert after the other. The GEMMs here read
its list of the experts' tensors, which is made with it: PARTS.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.te_on_cpu.extension.gemm import product
from tests.te_on_cpu.extension.quantize import quantize

PARTS = "_parts_on_cpu"
"""The experts' quantized tensors; an attribute of a storage."""

_STORAGE = "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage"
_BUFFERS = {
    "data": ("_rowwise_data", "_data"),
    "columnwise_data": ("_columnwise_data", "_transpose"),
    "scale_inv": ("_rowwise_scale_inv", "_scale_inv"),
    "columnwise_scale_inv": ("_columnwise_scale_inv",),
}
"""Buffers of the storage, and what quantized tensors call theirs."""


def splits_to_offsets_multi(
    first_dims: Tensor,
    device: torch.device,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """misc.cpp: the sizes as int64, and for each stride where each expert's elements end."""
    sizes = first_dims.to(torch.int64)
    offsets = []
    for stride, leads, dtype in zip(strides, include_leading_zero, dtypes, strict=True):
        ends = sizes.cumsum(0) * stride
        found = torch.cat([ends.new_zeros(1), ends]) if leads else ends
        offsets.append(found.to(dtype))
    return sizes, offsets


@torch.no_grad()
def group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    *,
    tensor_offsets: Tensor | None = None,
) -> Any:
    """cast.cpp: each expert's rows are a tensor of its own, with scales of its own."""
    matrix = tensor.reshape(-1, tensor.shape[-1])
    parts = [quantize(rows, quantizer) for rows in _rows(matrix, num_tensors, first_dims)]
    buffers = {}
    for name, names in _BUFFERS.items():
        of_parts = [next((getattr(p, n) for n in names if hasattr(p, n)), None) for p in parts]
        held = [each.reshape(-1) for each in of_parts if each is not None]
        if len(held) == len(parts):
            buffers[name] = torch.cat(held)
    storage = importlib.import_module(_STORAGE).GroupedTensorStorage(
        shape=tuple(matrix.shape),
        dtype=tensor.dtype,
        num_tensors=num_tensors,
        quantizer=quantizer,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        **buffers,
    )
    setattr(storage, PARTS, parts)
    return storage


def te_general_grouped_gemm_for_discrete_in(
    A: Sequence[Any], transa: bool, B: Any, transb: bool, D: Any, bias: Any, *rest: Any
) -> Any:
    """gemm.cpp: fprop and dgrad with weights that are tensors of their own."""
    return _grouped_gemm(list(A), transa, B, transb, D, bias, *rest)


def te_general_grouped_gemm_for_grouped_tensor(
    A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, *rest: Any
) -> Any:
    """gemm.cpp: all three operands are of all experts."""
    return _grouped_gemm(_parts(A), transa, B, transb, D, bias, *rest)


def te_general_grouped_gemm_for_discrete_out(
    A: Any, transa: bool, B: Any, transb: bool, D: Any, bias: Any, *rest: Any
) -> Any:
    """gemm.cpp: wgrad into gradients that are tensors of their own."""
    return _grouped_gemm(_parts(A), transa, B, transb, D, bias, *rest)


@torch.no_grad()
def _grouped_gemm(
    a_parts: Sequence[Any],
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    workspace_setup: Tensor,
    workspace_cublas: Tensor,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any:
    b_parts = _parts(B)
    targets = list(D) if isinstance(D, list) else _parts(D)
    biases = [None] * len(targets) if bias is None else _parts(bias)
    start = 0
    for i, (a, b, target, own_bias) in enumerate(
        zip(a_parts, b_parts, targets, biases, strict=True)
    ):
        out = product(a, transa, b, transb) * alpha[i % len(alpha)]
        if own_bias is not None:
            end = start + len(out)
            scale = 1.0 if bias_scale is None else bias_scale[start:end, None]
            out = out + own_bias.float() * scale
            start = end
        factor = beta[i % len(beta)]
        target.copy_(out + target.float() * factor if factor else out)
    return D


def _parts(storage: Any) -> list[Any]:
    """Return the experts' tensors; of a storage that is not quantized they are views."""
    found = getattr(storage, PARTS, None)
    if found is not None and storage.quantizer is not None:
        return list(found)
    matrix = storage.rowwise_data.view(storage.logical_shape)
    return _rows(matrix, storage.num_tensors, storage.first_dims)


def _rows(matrix: Tensor, num_tensors: int, first_dims: Tensor | None) -> list[Tensor]:
    if first_dims is None:
        return list(matrix.chunk(num_tensors))
    sizes = first_dims.tolist()
    return list(matrix[: sum(sizes)].split(sizes))
