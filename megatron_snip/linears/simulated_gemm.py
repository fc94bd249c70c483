"""fprop, dgrad and wgrad of one linear under an option, simulated.

    fprop   Y  = Q(X) Q(W)^T      dgrad   dX = Q(G) Q(W)      wgrad   dW = Q(G)^T Q(X)

Each GEMM quantizes its operands along its own contraction dimension. Operands are dequantized to
FP32 and multiplied with FP32 accumulation, then the result is rounded to the output's dtype once,
as a block-scaled tensor-core GEMM does up to the order of its accumulation. On a GPU the
dequantized operands of large GEMMs are BF16 (`matmul_fp32`). A bf16 GEMM is a plain product in
its operands' dtype, but for wgrad that is added into an FP32 `main_grad`.

M tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.matmul import LARGE_GEMM, matmul_fp32
from megatron_snip.options import Option
from megatron_snip.quantizers.quantize import (
    needs_tensor_amax,
    operand_block,
    quantize_dequantize_operand,
    quantize_dequantize_pair,
)
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.types import Gemm, Operand

WeightCache = dict[Hashable, Tensor]
"""The quantized forms of one weight, by format, block and dtype."""


def quantize_activation(
    x: Tensor,
    operand: Operand,
    option: Option,
    dtype: torch.dtype,
    *gemms: Gemm,
    stream: StochasticStream | None = None,
) -> list[Tensor]:
    """Return X or G as each of `gemms` multiplies it.

    Kernels read the operand once for two GEMMs.

    Args:
        x: X [M, K] or G [M, N].
        operand: which of them.
        option: decides the formats; for a bf16 GEMM the tensor is returned as it is.
        dtype: of a quantized result, from `operand_dtype`.
        gemms: one of the operand's two, or both: first fprop or dgrad, then wgrad.
        stream: random numbers, for formats that round G stochastically.
    """
    names = [option[gemm] for gemm in gemms]
    if len(names) == 2 and "bf16" not in names:
        pair = names[0], names[1]
        return list(quantize_dequantize_pair(x, pair, operand, stream=stream, dtype=dtype))
    return [
        x
        if name == "bf16"
        else quantize_dequantize_operand(x, name, operand, gemm, stream=stream, dtype=dtype)
        for name, gemm in zip(names, gemms, strict=True)
    ]


def can_quantize_before_gather(option: Option, num_rows: int) -> bool:
    """Return whether quantizing X before the all-gather gives bitwise the same as after it.

    Args:
        option: decides the formats of X.
        num_rows: tokens of a shard.
    """
    for name, gemm in ((option.fprop, Gemm.FPROP), (option.wgrad, Gemm.WGRAD)):
        fmt = get_format(name)
        tile_rows, _ = operand_block(fmt, Operand.INPUT, gemm)
        if fmt.quantized and (needs_tensor_amax(fmt) or num_rows % tile_rows):
            return False
    return True


def activation_gemm(
    a: Tensor,
    w: Tensor,
    gemm: Gemm,
    option: Option,
    dtype: torch.dtype,
    cache: WeightCache | None = None,
) -> Tensor:
    """Return Y = X W^T [M, N] for fprop, dX = G W [M, K] for dgrad.

    Args:
        a: X [M, K] or G [M, N], from `quantize_activation`.
        w: W [N, K].
        gemm: fprop or dgrad.
        option: decides the format of both.
        dtype: of a quantized GEMM's result; a bf16 GEMM has that of its operands.
        cache: holds the quantized W; fprop and dgrad share one where their blocks are equal.
    """
    name, is_fprop = option[gemm], gemm is Gemm.FPROP
    if name == "bf16":
        return torch.matmul(a, w.t() if is_fprop else w)
    used = operand_dtype(a, w.shape[0 if is_fprop else 1])
    key = (name, operand_block(get_format(name), Operand.WEIGHT, gemm), used)
    cache = {} if cache is None else cache
    if key not in cache:
        cache[key] = quantize_dequantize_operand(w, name, Operand.WEIGHT, gemm, dtype=used)
    return matmul_fp32(a, cache[key].t() if is_fprop else cache[key], dtype)


def wgrad_gemm(g: Tensor, x: Tensor, option: Option, dtype: torch.dtype) -> Tensor:
    """Return dW [N, K] in `dtype`.

    Args:
        g: [M, N], from `quantize_activation`.
        x: [M, K], likewise.
        option: decides the format of both.
        dtype: of the result; FP32 for GEMMs that add into `main_grad`.
    """
    if option.wgrad == "bf16" and dtype == g.dtype:
        return g.t().matmul(x)
    return matmul_fp32(g.t(), x, dtype)


def operand_dtype(tensor: Tensor, other: int) -> torch.dtype:
    """Return what quantized operands are written in: FP32, or BF16 where `matmul_fp32` takes it.

    Args:
        tensor: one operand, whose dims are two of the GEMM's three.
        other: the third.
    """
    large = tensor.is_cuda and tensor.numel() * other > LARGE_GEMM
    return torch.bfloat16 if large else torch.float32
