"""fprop, dgrad and wgrad of one linear under an option, by exact emulation (`simulate`).

    fprop   Y  = Q(X) Q(W)^T      dgrad   dX = Q(G) Q(W)      wgrad   dW = Q(G)^T Q(X)

Each GEMM quantizes its own operands along its contraction dimension. Operands are dequantized to
FP32 and multiplied with FP32 accumulation, then the result is rounded to the output's dtype once,
as a block-scaled tensor-core GEMM does up to the order of its accumulation. bf16 GEMMs run as
Megatron runs them.

M tokens, K in_features, N out_features.
"""

from __future__ import annotations

import torch

from megatron_snip.matmul import matmul_fp32
from megatron_snip.options import Option
from megatron_snip.quantizers import StochasticStream, quantize_dequantize_operand
from megatron_snip.types import Gemm, Operand


def fprop(x: torch.Tensor, w: torch.Tensor, option: Option) -> torch.Tensor:
    """Return Y [M, N] in X's dtype.

    Args:
        x: [M, K].
        w: [N, K].
        option: decides the format of both.
    """
    name = option[Gemm.FPROP]
    if name == "bf16":
        return torch.matmul(x, w.t())
    x_q = _operand(x, name, Operand.INPUT, Gemm.FPROP)
    w_q = _operand(w, name, Operand.WEIGHT, Gemm.FPROP)
    return matmul_fp32(x_q, w_q.t()).to(x.dtype)


def dgrad(
    g: torch.Tensor, w: torch.Tensor, option: Option, stream: StochasticStream
) -> torch.Tensor:
    """Return dX [M, K] in G's dtype.

    Args:
        g: [M, N].
        w: [N, K].
        option: decides the format of both.
        stream: random numbers, where the format rounds G stochastically.
    """
    name = option[Gemm.DGRAD]
    if name == "bf16":
        return g.matmul(w)
    g_q = _operand(g, name, Operand.GRAD_OUTPUT, Gemm.DGRAD, stream)
    w_q = _operand(w, name, Operand.WEIGHT, Gemm.DGRAD)
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
    g_q = _operand(g, name, Operand.GRAD_OUTPUT, Gemm.WGRAD, stream)
    x_q = _operand(x, name, Operand.INPUT, Gemm.WGRAD)
    return matmul_fp32(g_q.t(), x_q)


def _operand(
    tensor: torch.Tensor,
    name: str,
    operand: Operand,
    gemm: Gemm,
    stream: StochasticStream | None = None,
) -> torch.Tensor:
    """Return what `gemm` sees of `tensor`, in FP32."""
    return quantize_dequantize_operand(
        tensor, name, operand, gemm, stream=stream, dtype=torch.float32
    )
