"""The errors of one linear in one format, measured exactly on one microbatch.

For tokens t = 1..M, X [M, K], W [N, K], G = dL/dY [M, N], and Q the format's quantizer:

    eY = Q(X) Q(W)^T - X W^T        forward error            [M, N]
    eW = Q(G)^T Q(X) - G^T X        weight-gradient error    [N, K]

Tiles run along each GEMM's contraction dimension, so fprop, dgrad and wgrad each quantize their
own operands (SNIP, arXiv:2602.01410, Sec. 3). dgrad's errors are looked at for the sampled tokens
only, by `coupling.py`. Everything is FP32. Nothing here communicates; what a shard
measures is a partial result whose sum over tensor-parallel ranks is formed by the recorder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_snip.formats import get_format
from megatron_snip.matmul import matmul_fp32
from megatron_snip.quantizers import StochasticStream, quantize_dequantize_operand, rotated
from megatron_snip.types import Gemm, Operand


@dataclass(frozen=True)
class Operands:
    """The three tensors of a linear in its backward, on this shard.

    Attributes:
        input: X [M, K].
        weight: W [N, K].
        grad_output: G [M, N].
    """

    input: torch.Tensor
    weight: torch.Tensor
    grad_output: torch.Tensor


@dataclass(frozen=True)
class ExactProducts:
    """What the three GEMMs give without quantization, shared by all formats.

    Attributes:
        output: Y [M, N] (of this shard).
        weight_gradient: dW [N, K].
    """

    output: torch.Tensor
    weight_gradient: torch.Tensor


@dataclass(frozen=True)
class FormatErrors:
    """The errors of one format on this shard.

    Attributes:
        output: eY [M, N]; a partial sum for a row-parallel linear.
        weight_gradient: eW [N, K].
        input_square: |Q(X) - X|^2, a scalar (tiles along K).
        weight_square: |Q(W) - W|^2, a scalar.
        grad_square: |Q(G) - G|^2, a scalar (tiles along tokens).
    """

    output: torch.Tensor
    weight_gradient: torch.Tensor
    input_square: torch.Tensor
    weight_square: torch.Tensor
    grad_square: torch.Tensor


def exact_products(operands: Operands) -> ExactProducts:
    """Compute fprop and wgrad without quantization, in FP32."""
    x, w, g = operands.input, operands.weight, operands.grad_output
    return ExactProducts(
        output=matmul_fp32(x, w.t()),
        weight_gradient=matmul_fp32(g.t(), x),
    )


def format_errors(
    operands: Operands,
    exact: ExactProducts,
    format_name: str,
    stream: StochasticStream,
) -> FormatErrors:
    """Measure one format.

    Args:
        operands: the linear's tensors.
        exact: their products without quantization.
        format_name: the format of all operands.
        stream: random numbers for G, where the format rounds it stochastically.
    """
    x, w, g = operands.input, operands.weight, operands.grad_output

    def quantized(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
        return quantize_dequantize_operand(
            tensor, format_name, operand, gemm, stream=stream, dtype=torch.float32
        )

    # wgrad first: of the two, eW is the smaller one to hold while the other's operands are made.
    g_w = quantized(g, Operand.GRAD_OUTPUT, Gemm.WGRAD)
    x_w = quantized(x, Operand.INPUT, Gemm.WGRAD)
    weight_gradient = matmul_fp32(g_w.t(), x_w).sub_(exact.weight_gradient)
    grad_square = squared_norm(g_w.sub_(rotated(g, get_format(format_name), Gemm.WGRAD)))
    del g_w, x_w

    x_q = quantized(x, Operand.INPUT, Gemm.FPROP)
    w_q = quantized(w, Operand.WEIGHT, Gemm.FPROP)
    output = matmul_fp32(x_q, w_q.t()).sub_(exact.output)
    input_square, weight_square = squared_norm(x_q.sub_(x)), squared_norm(w_q - w)
    return FormatErrors(output, weight_gradient, input_square, weight_square, grad_square)


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares as an FP64 scalar on the tensor's device."""
    return token_squares(tensor.reshape(1, -1) if tensor.dim() < 2 else tensor).sum()


def token_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return each row's sum of squares.

    Args:
        tensor: [rows, cols], any float dtype.

    Returns:
        [rows], FP64 (each row summed in FP32, which keeps 6 digits at 16k columns).
    """
    norms: torch.Tensor = torch.linalg.vector_norm(tensor.float(), dim=-1)
    return norms.double().square()
