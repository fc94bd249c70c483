"""Rows and columns moved about: padding of experts, transposes, swizzled scales, offsets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def fused_multi_row_padding(
    input: Tensor,
    output: Tensor,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None:
    """padding.cpp:12: zeros below the rows of each expert."""
    output.zero_()
    source = target = 0
    for num_rows, padded in zip(input_row_list, padded_input_row_list, strict=True):
        output[target : target + num_rows] = input[source : source + num_rows]
        source += num_rows
        target += padded


def fused_multi_row_unpadding(
    input: Tensor,
    output: Tensor,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None:
    """padding.cpp:84."""
    source = target = 0
    for num_rows, unpadded in zip(input_row_list, unpadded_input_row_list, strict=True):
        output[target : target + unpadded] = input[source : source + unpadded]
        source += num_rows
        target += unpadded


def fp8_transpose(input: Tensor, dtype: int, *, out: Tensor | None = None) -> Tensor:
    """transpose.cpp:20: the last dimension becomes the first."""
    flat = input.reshape(-1, input.shape[-1]).t().contiguous()
    transposed = flat.reshape(input.shape[-1], *input.shape[:-1])
    return transposed if out is None else out.copy_(transposed)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """transpose.cpp:263."""
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """swizzle.cpp:609. Scales stay compact here; only the mark changes."""
    tensor._with_gemm_swizzled_scales = True


def multi_tensor_swizzle_scales_for_gemm_(
    tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool
) -> None:
    """swizzle.cpp:596. Scales stay compact here."""


def multi_tensor_swizzle_scales_for_gemm_unchecked_(
    tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool
) -> None:
    """swizzle.cpp:602. Scales stay compact here."""


def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    """misc.cpp:24: where each expert's elements begin, and where the last one's end."""
    starts = torch.zeros(first_dims.numel() + 1, dtype=torch.int64)
    starts[1:] = first_dims.cumsum(0)
    return starts * logical_last_dim
