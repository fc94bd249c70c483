"""A rank's shard of FP32 weights into weights that are stored quantized (`--fp8-param-gather`).

A shard is a range of a weight's elements in row order, from `start_offset` on. Amaxes of it are
reduced over ranks between two calls; scales then are those of the complete weight, and the bytes
are those that quantizing the complete weight gives.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.te_on_cpu.extension.enums import torch_dtype
from tests.te_on_cpu.extension.fp8 import FP32_MAX, e8m0_rounded_up, e8m0_values
from tests.te_on_cpu.extension.numbers import (
    amax_of,
    cast_fp4,
    cast_fp8,
    packed,
    scale_from_amax,
    spread,
    tile_amaxes,
    unpacked,
)
from tests.te_on_cpu.extension.nvfp4 import E2M1_MAX, E4M3_MAX, encode_scale, inverse_scale

Lists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """multi_tensor/compute_scale.cpp:11. Lists: amaxes, scales, inverse scales."""
    for amax, scale, inverse in zip(*tensor_lists, strict=True):
        found = scale_from_amax(amax.float(), max_fp8, epsilon, force_pow_2_scales, FP32_MAX)
        scale.copy_(found.view(scale.shape))
        inverse.copy_(found.reciprocal().view(inverse.shape))


@torch.no_grad()
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Lists
) -> None:
    """multi_tensor/compute_scale.cpp:22, of E4M3. Lists: amaxes, scales."""
    for amax, scales in zip(*tensor_lists, strict=True):
        scales.copy_(e8m0_rounded_up(amax.float() * (1.0 / E4M3_MAX)))


@torch.no_grad()
def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """fp8_partial_cast.cpp:14."""
    _store_amaxes(_complete(tensor, h, w, start_offset), block_len, block_len, amax)


@torch.no_grad()
def fp8_block_scaling_partial_cast(
    inp: Tensor,
    out: Tensor,
    scale: Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: int,
) -> None:
    """fp8_partial_cast.cpp:26."""
    scales = _part(spread(scale, block_len, block_len, torch.Size((h, w))), inp, start_offset)
    out.copy_(cast_fp8(inp.float() * scales, torch_dtype(out_dtype)))


@torch.no_grad()
def mxfp8_scaling_compute_partial_amax(
    input: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: int, cols: int, start: int
) -> None:
    """fp8_partial_cast.cpp:46."""
    complete = _complete(input, rows, cols, start)
    _store_amaxes(complete, 1, 32, amax_rowwise)
    _store_amaxes(complete, 32, 1, amax_colwise)


@torch.no_grad()
def mxfp8_scaling_partial_cast(
    input: Tensor,
    output_rowwise: Tensor,
    output_colwise: Tensor,
    scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """fp8_partial_cast.cpp:64."""
    shape = torch.Size((rows, cols))
    for out, bits, height, width in (
        (output_rowwise, scale_inv_rowwise, 1, 32),
        (output_colwise, scale_inv_colwise, 32, 1),
    ):
        scales = _part(spread(e8m0_values(bits), height, width, shape), input, start_offset)
        out.copy_(cast_fp8(input.float() / scales, torch.float8_e4m3fn))


@torch.no_grad()
def nvfp4_multi_tensor_compute_partial_amax(
    tensors: Sequence[Tensor],
    partial_amaxes: Sequence[Tensor],
    global_amaxes: Sequence[Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
    start_offsets: Sequence[int],
    block_len: int,
) -> None:
    """nvfp4_2d_partial_cast.cpp."""
    shards = zip(
        tensors, partial_amaxes, global_amaxes, heights, widths, start_offsets, strict=True
    )
    for tensor, amaxes, amax, height, width, start in shards:
        _store_amaxes(_complete(tensor, height, width, start), block_len, block_len, amaxes)
        amax.copy_(amax_of(tensor))


@torch.no_grad()
def nvfp4_compute_global_scale(global_amax: Tensor, global_scale: Tensor) -> None:
    """transpose.cpp; compute_global_encode_scaling_factor_FP4."""
    global_scale.copy_(encode_scale(global_amax, E4M3_MAX))


@torch.no_grad()
def nvfp4_multi_tensor_fused_scale(
    block_amaxes: Sequence[Tensor],
    global_amaxes: Sequence[Tensor],
    block_scales: Sequence[Tensor],
    target_scales: Sequence[Tensor],
    target_amaxes: Sequence[Tensor],
    tile_rows: Sequence[int],
    tile_columns: Sequence[int],
    padded_rows: Sequence[int],
    block_len: int,
) -> None:
    """transpose.cpp: scales of blocks in FP32 and, for each row, in E4M3; and the amax."""
    weights = zip(
        block_amaxes, global_amaxes, block_scales, target_scales, target_amaxes, strict=True
    )
    for amaxes, amax, scales, target, target_amax in weights:
        encode = encode_scale(amax, E4M3_MAX)
        scales.copy_((amaxes * (encode * (1.0 / E2M1_MAX))).clamp(max=E4M3_MAX))
        rows = scales.to(torch.float8_e4m3fn).view(torch.uint8).repeat_interleave(block_len, 0)
        target.zero_()
        height = min(rows.shape[0], target.shape[0])
        target[:height, : rows.shape[1]] = rows[:height]
        target_amax.copy_(amax.view(target_amax.shape))


@torch.no_grad()
def nvfp4_multi_tensor_2d_partial_cast(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    block_scales: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
    start_offsets: Sequence[int],
    block_len: int,
) -> None:
    """nvfp4_2d_partial_cast.cpp: two codes a byte; a shard starts and ends between bytes."""
    shards = zip(
        tensors, outputs, block_scales, global_scales, heights, widths, start_offsets, strict=True
    )
    for tensor, out, scales, encode, height, width, start in shards:
        inverse = inverse_scale(scales.to(torch.float8_e4m3fn), encode)
        factors = spread(inverse, block_len, block_len, torch.Size((height, width)))
        codes = cast_fp4(tensor.float().reshape(-1) * _part(factors, tensor, start))
        out.copy_(packed(codes.reshape(1, -1)).reshape(out.shape))


@torch.no_grad()
def nvfp4_2d_multi_tensor_transpose(
    rowwise_data: Sequence[Tensor],
    columnwise_data: Sequence[Tensor],
    rowwise_scales: Sequence[Tensor],
    columnwise_scales: Sequence[Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
) -> None:
    """transpose.cpp: a block of 16x16 has one scale, so columns have the codes of rows."""
    weights = zip(
        *(rowwise_data, columnwise_data, rowwise_scales, columnwise_scales, heights, widths),
        strict=True,
    )
    for rows, columns, row_scales, column_scales, height, width in weights:
        codes = unpacked(rows.reshape(height, width // 2))
        columns.copy_(packed(codes.t().contiguous()).reshape(columns.shape))
        blocks = row_scales[:height:16, : width // 16]
        column_scales.zero_()
        column_scales[:width, : height // 16] = blocks.t().repeat_interleave(16, 0)


def _complete(shard: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """Return the weight with zeros where other ranks have it."""
    complete = torch.zeros(rows * columns)
    complete[start : start + shard.numel()] = shard.float().reshape(-1)
    return complete.reshape(rows, columns)


def _part(complete: Tensor, shard: Tensor, start: int) -> Tensor:
    return complete.reshape(-1)[start : start + shard.numel()].view(shard.shape)


def _store_amaxes(complete: Tensor, height: int, width: int, amaxes: Tensor) -> None:
    """Amaxes of tiles; their buffer may be padded."""
    found = tile_amaxes(complete, height, width)
    amaxes[: found.shape[0], : found.shape[1]] = found
