"""NVFP4 as the kernels store it: E2M1 values, an E4M3 scale per 16, and an FP32 amax per tensor.

    x ~ e2m1 * scale * amax / (6 * 448)

Columns are quantized from x transposed, which a random Hadamard transform (RHT) rotates first where
the quantizer has one. With 4over6 each tile is encoded twice, its amax as 6 and as 4, and the
encoding with the smaller error is kept; scales then may be limited to 256, to leave room for that.
"""

import os
from typing import Any

import torch
from torch import Tensor

from tests.te_on_cpu.extension.numbers import (
    amax_of,
    cast_fp4,
    check,
    divided,
    fp4_values,
    packed,
    spread,
    tile_amaxes,
)

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP32_MAX = torch.finfo(torch.float32).max


def fill_nvfp4(x: Tensor, quantizer: Any, out: Any) -> None:
    """NVFP4Quantizer::quantize_impl, quantizer.cpp:2508."""
    _check(x, quantizer)
    sides = {}
    if out._rowwise_data is not None:
        sides["rowwise"] = x.float()
    if out._columnwise_data is not None:
        sides["columnwise"] = _rotated(x.t().contiguous(), quantizer)
    amaxes = {side: _amax(matrix, quantizer) for side, matrix in sides.items()}
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        for amax in amaxes.values():
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
    for side, matrix in sides.items():
        amax = amaxes[side]
        encoded = _four_over_six if _uses_4over6(quantizer) else _nearest
        codes, scales = encoded(matrix, amax.reshape(-1, 1), quantizer)
        data = packed(codes)
        getattr(out, f"_{side}_data").view(data.shape).copy_(data)
        stored = getattr(out, f"_{side}_scale_inv")
        stored.zero_()
        stored[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
        getattr(out, f"_amax_{side}").copy_(amax)


def _is_row_scaled(quantizer: Any) -> bool:
    return bool(getattr(quantizer, "row_scaled_nvfp4", False))


def _uses_4over6(quantizer: Any) -> bool:
    return bool(getattr(quantizer, "nvfp4_use_4over6", False))


def _check(x: Tensor, quantizer: Any) -> None:
    """quantizer.cpp:2561 to 2581, 2630 to 2650."""
    if quantizer.with_rht:
        check(
            x.dtype == torch.bfloat16,
            f"RHT is only supported for bfloat16 input, got {x.dtype}",
        )
        check(quantizer.with_post_rht_amax, "Pre-RHT amax is not supported yet.")
    if _uses_4over6(quantizer):
        what = "NVFP4 4over6 quantization does not support"
        check(not quantizer.with_rht, f"{what} RHT.")
        check(not quantizer.stochastic_rounding, f"{what} stochastic rounding.")
    if _is_row_scaled(quantizer):
        what = "Row-scaled NVFP4 quantization does not support"
        check(not quantizer.with_rht, f"{what} RHT.")
        check(not quantizer.with_2d_quantization, f"{what} 2D quantization.")
        check(not quantizer.stochastic_rounding, f"{what} stochastic rounding.")
        check(not quantizer.with_amax_reduction, f"{what} amax reduction.")


def _rotated(transposed: Tensor, quantizer: Any) -> Tensor:
    """nvte_hadamard_transform, common/hadamard_transform/: groups of 16, rounded to BF16."""
    if not quantizer.with_rht:
        return transposed.float()
    groups = transposed.float().reshape(-1, 16) @ quantizer.rht_matrix.float()
    return groups.reshape(transposed.shape).bfloat16().float()


def _amax(matrix: Tensor, quantizer: Any) -> Tensor:
    """The amax of the tensor, [1], or of each row."""
    if not _is_row_scaled(quantizer):
        return amax_of(matrix)
    return matrix.abs().nan_to_num(0.0, torch.inf).amax(1)


def encode_scale(amax: Tensor, e4m3_max: float) -> Tensor:
    """compute_global_encode_scaling_factor_FP4, common/cast/nvfp4/core_nvfp4.cuh:75."""
    scale = divided(e4m3_max * E2M1_MAX, amax).clamp(max=FP32_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def _nearest(values: Tensor, amax: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Codes and E4M3 scales; common/cast/nvfp4/quantize_transpose_nvfp4.cuh, core_nvfp4.cuh:42.

    Args:
        values: [rows, columns] in FP32.
        amax: [1, 1] or [rows, 1].
        quantizer: of the tensor.
    """
    height = 16 if quantizer.with_2d_quantization else 1
    tiles = tile_amaxes(values, height, 16).repeat_interleave(height, 0)
    encode = encode_scale(amax, E4M3_MAX)
    scales = (tiles * (encode * (1.0 / E2M1_MAX))).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    inverse = inverse_scale(scales, encode)
    scaled = values * spread(inverse, 1, 16, values.shape)
    return cast_fp4(scaled, quantizer.stochastic_rounding), scales


def inverse_scale(scales: Tensor, encode: Tensor) -> Tensor:
    """What values are multiplied with."""
    return (scales.float() * encode.reciprocal()).reciprocal().clamp(max=FP32_MAX)


def _four_over_six(values: Tensor, amax: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Codes and E4M3 scales; common/cast/nvfp4/quantize_4over6_nvfp4.cuh:118 (compute_scale_pair).

    The candidates' errors are added in the order of the kernel, as ties and last bits decide.
    """
    check(
        os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0") == "0",
        "not implemented on the CPU: NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1",
    )
    height = 16 if quantizer.with_2d_quantization else 1
    tiles = tile_amaxes(values, height, 16).repeat_interleave(height, 0)
    e4m3_max = float(quantizer.nvfp4_e4m3_max)
    encode = encode_scale(amax, e4m3_max)
    base = tiles / E2M1_MAX * encode
    squared = quantizer.nvfp4_4over6_err_mode == "MSE"
    candidates = []
    for expansion in (1.5, 1.0):
        scales = (base * expansion).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        codes = cast_fp4(values * spread(inverse_scale(scales, encode), 1, 16, values.shape))
        decoded = fp4_values(codes) * spread(scales.float(), 1, 16, values.shape)
        difference = decoded * amax / (E2M1_MAX * e4m3_max) - values
        errors = difference.square() if squared else difference.abs()
        candidates.append((codes, scales, _summed(errors, height)))
    (codes_4, scales_4, error_4), (codes_6, scales_6, error_6) = candidates
    picks_4 = error_4 < error_6
    codes = torch.where(spread(picks_4, 1, 16, values.shape), codes_4, codes_6)
    bits = torch.where(picks_4, scales_4.view(torch.uint8), scales_6.view(torch.uint8))
    return codes, bits.view(torch.float8_e4m3fn)


def _summed(errors: Tensor, height: int) -> Tensor:
    """Add 16 values of a row one by one, then rows of a block in the order of a warp's shuffle."""
    groups = errors.reshape(errors.shape[0], -1, 16)
    total = torch.zeros_like(groups[..., 0])
    for i in range(16):
        total = total + groups[..., i]
    if height == 1:
        return total
    rows = total.reshape(-1, 16, total.shape[1])
    for half in (8, 4, 2, 1):
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows.repeat_interleave(16, 1).reshape(total.shape)
