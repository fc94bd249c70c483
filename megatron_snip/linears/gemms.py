"""fprop, dgrad and wgrad of one linear under an option, by exact emulation (`simulate`).

    fprop   Y  = Q(X) Q(W)^T      dgrad   dX = Q(G) Q(W)      wgrad   dW = Q(G)^T Q(X)

Each GEMM quantizes its own operands along its contraction dimension. Operands are dequantized to
FP32 and multiplied with FP32 accumulation, then the result is rounded to the output's dtype once,
as a block-scaled tensor-core GEMM does up to the order of its accumulation. bf16 GEMMs run as
Megatron runs them. On a GPU the operands of large GEMMs are rounded to BF16 (`matmul_fp32`), and
are written so by the quantizer itself.

M tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from megatron_snip.formats import get_format
from megatron_snip.matmul import matmul_fp32
from megatron_snip.options import Option
from megatron_snip.quantizers import (
    StochasticStream,
    operand_block,
    quantize_dequantize_operand,
)
from megatron_snip.types import Gemm, Operand

KeepTensor = Callable[[Hashable, Callable[[], torch.Tensor]], torch.Tensor]
"""(what form of the weight, how to make it) -> the form, made now or kept (`kept_weights`)."""


def unkept(_: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Keep nothing."""
    return make()


def fprop(
    x: torch.Tensor, w: torch.Tensor, option: Option, keep: KeepTensor = unkept
) -> torch.Tensor:
    """Return Y [M, N] in X's dtype.

    Args:
        x: [M, K].
        w: [N, K].
        option: decides the format of both.
        keep: keeps the quantized W.
    """
    name = option[Gemm.FPROP]
    if name == "bf16":
        return torch.matmul(x, w.t())
    dtype = _operand_dtype(x, w.shape[0])
    x_q = _operand(x, name, Operand.INPUT, Gemm.FPROP, dtype)
    w_q = _weight(w, name, Gemm.FPROP, dtype, keep)
    return matmul_fp32(x_q, w_q.t()).to(x.dtype)


def dgrad(
    g: torch.Tensor,
    w: torch.Tensor,
    option: Option,
    stream: StochasticStream,
    keep: KeepTensor = unkept,
) -> torch.Tensor:
    """Return dX [M, K] in G's dtype.

    Args:
        g: [M, N].
        w: [N, K].
        option: decides the format of both.
        stream: random numbers, where the format rounds G stochastically.
        keep: keeps the quantized W.
    """
    name = option[Gemm.DGRAD]
    if name == "bf16":
        return g.matmul(w)
    dtype = _operand_dtype(g, w.shape[1])
    g_q = _operand(g, name, Operand.GRAD_OUTPUT, Gemm.DGRAD, dtype, stream)
    w_q = _weight(w, name, Gemm.DGRAD, dtype, keep)
    return matmul_fp32(g_q, w_q).to(g.dtype)


def wgrad(
    g: torch.Tensor,
    x: torch.Tensor,
    option: Option,
    stream: StochasticStream,
    fp32_output: bool = False,
) -> torch.Tensor:
    """Return dW [N, K]: FP32 if the option quantizes wgrad or it is asked for, else G's dtype.

    Args:
        g: [M, N].
        x: [M, K].
        option: decides the format of both.
        stream: random numbers, where the format rounds G stochastically.
        fp32_output: keep the accumulator's FP32, as GEMMs that add into `main_grad` do.
    """
    name = option[Gemm.WGRAD]
    if name == "bf16":
        return matmul_fp32(g.t(), x) if fp32_output else g.t().matmul(x)
    dtype = _operand_dtype(g, x.shape[1])
    g_q = _operand(g, name, Operand.GRAD_OUTPUT, Gemm.WGRAD, dtype, stream)
    x_q = _operand(x, name, Operand.INPUT, Gemm.WGRAD, dtype)
    return matmul_fp32(g_q.t(), x_q)


def _operand(
    tensor: torch.Tensor,
    name: str,
    operand: Operand,
    gemm: Gemm,
    dtype: torch.dtype,
    stream: StochasticStream | None = None,
) -> torch.Tensor:
    """Return what `gemm` sees of `tensor`."""
    return quantize_dequantize_operand(tensor, name, operand, gemm, stream=stream, dtype=dtype)


def _weight(
    w: torch.Tensor, name: str, gemm: Gemm, dtype: torch.dtype, keep: KeepTensor
) -> torch.Tensor:
    """Return what `gemm` sees of W; fprop and dgrad share one where their blocks are the same."""
    form = ("simulate", name, operand_block(get_format(name), Operand.WEIGHT, gemm), dtype)
    return keep(form, lambda: _operand(w, name, Operand.WEIGHT, gemm, dtype))


def _operand_dtype(tensor: torch.Tensor, other: int) -> torch.dtype:
    """Return FP32, or BF16 where `matmul_fp32` would round operands to it.

    Args:
        tensor: one operand, whose dims are two of the GEMM's three.
        other: the third.
    """
    large = tensor.is_cuda and tensor.numel() * other > LARGE_GEMM
    return torch.bfloat16 if large else torch.float32


LARGE_GEMM = 1 << 24
"""Multiply-adds from which `matmul_fp32` uses tensor cores on a GPU."""
