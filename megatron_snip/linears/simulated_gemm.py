"""fprop, dgrad and wgrad of one linear under an option, by exact simulation.

    fprop   Y  = Q(X) Q(W)^T      dgrad   dX = Q(G) Q(W)      wgrad   dW = Q(G)^T Q(X)

Each GEMM quantizes its operands along its own contraction dimension. Operands are dequantized to
FP32 and multiplied with FP32 accumulation, then the result is rounded to the output's dtype once,
as a block-scaled tensor-core GEMM does up to the order of its accumulation. bf16 GEMMs run as
Megatron runs them. On a GPU the operands of large GEMMs are rounded to BF16 (`matmul_fp32`); the
quantizer itself writes them so.

M tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.matmul import LARGE_GEMM, matmul_fp32
from megatron_snip.options import Option
from megatron_snip.quantizers.quantize import (
    operand_block,
    quantize_dequantize_operand,
    quantize_dequantize_pair,
)
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.types import Gemm, Operand

Cached = Callable[[Hashable, Callable[[], Tensor]], Tensor]
"""(key, function that quantizes a weight) -> the quantized weight, new or from a cache."""


def uncached(_: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Quantize the weight now."""
    return make()


def fprop(x: Tensor, w: Tensor, option: Option, cached: Cached = uncached) -> Tensor:
    """Return Y [M, N] in X's dtype.

    Args:
        x: [M, K].
        w: [N, K].
        option: decides the format of both.
        cached: caches the quantized W.
    """
    name = option.fprop
    if name == "bf16":
        return torch.matmul(x, w.t())
    dtype = _operand_dtype(x, w.shape[0])
    x_q = quantize_dequantize_operand(x, name, Operand.INPUT, Gemm.FPROP, dtype=dtype)
    return matmul_fp32(x_q, _weight(w, name, Gemm.FPROP, dtype, cached).t(), x.dtype)


def quantize_grad_output(
    g: Tensor,
    option: Option,
    stream: StochasticStream,
    in_features: int,
    *,
    dgrad: bool = True,
    wgrad: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return G as dgrad and as wgrad multiply it, from one read where kernels run.

    Args:
        g: [M, N].
        option: decides the formats; for a bf16 GEMM G is returned as it is.
        stream: random numbers, for formats that round G stochastically.
        in_features: K.
        dgrad: whether the first is needed; else None is returned for it.
        wgrad: likewise the second.
    """
    names, dtype = (option.dgrad, option.wgrad), _operand_dtype(g, in_features)
    role = Operand.GRAD_OUTPUT
    if dgrad and wgrad and "bf16" not in names:
        return quantize_dequantize_pair(g, names, role, stream=stream, dtype=dtype)

    def one(name: str, gemm: Gemm) -> Tensor:
        if name == "bf16":
            return g
        return quantize_dequantize_operand(g, name, role, gemm, stream=stream, dtype=dtype)

    return (
        one(names[0], Gemm.DGRAD) if dgrad else None,
        one(names[1], Gemm.WGRAD) if wgrad else None,
    )


def dgrad(
    g: Tensor, w: Tensor, option: Option, dtype: torch.dtype, cached: Cached = uncached
) -> Tensor:
    """Return dX [M, K] in `dtype`.

    Args:
        g: [M, N], from `quantize_grad_output`.
        w: [N, K].
        option: decides the format of both.
        dtype: of the result.
        cached: caches the quantized W.
    """
    if option.dgrad == "bf16":
        return g.matmul(w)
    w_q = _weight(w, option.dgrad, Gemm.DGRAD, _operand_dtype(g, w.shape[1]), cached)
    return matmul_fp32(g, w_q, dtype)


def wgrad(g: Tensor, x: Tensor, option: Option, dtype: torch.dtype) -> Tensor:
    """Return dW [N, K] in `dtype`.

    Args:
        g: [M, N], from `quantize_grad_output`.
        x: [M, K].
        option: decides the format of both.
        dtype: of the result; FP32 for GEMMs that add into `main_grad`.
    """
    if option.wgrad == "bf16":
        return g.t().matmul(x) if dtype == g.dtype else matmul_fp32(g.t(), x, dtype)
    operand = _operand_dtype(g, x.shape[1])
    x_q = quantize_dequantize_operand(x, option.wgrad, Operand.INPUT, Gemm.WGRAD, dtype=operand)
    return matmul_fp32(g.t(), x_q, dtype)


def _weight(w: Tensor, name: str, gemm: Gemm, dtype: torch.dtype, cached: Cached) -> Tensor:
    """Return W as `gemm` multiplies it; fprop and dgrad share one where their blocks are equal."""
    key = (name, operand_block(get_format(name), Operand.WEIGHT, gemm), dtype)
    return cached(
        key, lambda: quantize_dequantize_operand(w, name, Operand.WEIGHT, gemm, dtype=dtype)
    )


def _operand_dtype(tensor: Tensor, other: int) -> torch.dtype:
    """Return FP32, or BF16 where `matmul_fp32` would round operands to it.

    Args:
        tensor: one operand, whose dims are two of the GEMM's three.
        other: the third.
    """
    large = tensor.is_cuda and tensor.numel() * other > LARGE_GEMM
    return torch.bfloat16 if large else torch.float32
