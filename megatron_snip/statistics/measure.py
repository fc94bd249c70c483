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
class FpropError:
    """What quantizing the operands of fprop does on this shard.

    Attributes:
        output: eY [M, N]; a partial sum for a row-parallel linear.
        input_square: |Q(X) - X|^2, a scalar (tiles along K).
        weight_square: |Q(W) - W|^2, a scalar.
    """

    output: torch.Tensor
    input_square: torch.Tensor
    weight_square: torch.Tensor


@dataclass(frozen=True)
class WgradError:
    """What quantizing the operands of wgrad does on this shard.

    Attributes:
        weight_gradient: eW [N, K].
        grad_square: |Q(G) - G|^2, a scalar (tiles along tokens).
    """

    weight_gradient: torch.Tensor
    grad_square: torch.Tensor


def exact_output(operands: Operands) -> torch.Tensor:
    """Compute Y [M, N] (of this shard) without quantization, in FP32."""
    return matmul_fp32(operands.input, operands.weight.t())


def exact_weight_gradient(operands: Operands) -> torch.Tensor:
    """Compute dW [N, K] without quantization, in FP32."""
    return matmul_fp32(operands.grad_output.t(), operands.input)


def fprop_error(operands: Operands, exact: torch.Tensor, format_name: str) -> FpropError:
    """Measure fprop in one format.

    Args:
        operands: the linear's tensors.
        exact: Y without quantization.
        format_name: the format of both operands.
    """
    x, w = operands.input, operands.weight
    x_q = _quantized(x, format_name, Operand.INPUT, Gemm.FPROP)
    w_q = _quantized(w, format_name, Operand.WEIGHT, Gemm.FPROP)
    output = matmul_fp32(x_q, w_q.t()).sub_(exact)
    return FpropError(output, squared_norm(x_q.sub_(x)), squared_norm(w_q.sub_(w)))


def wgrad_error(
    operands: Operands, exact: torch.Tensor, format_name: str, stream: StochasticStream
) -> WgradError:
    """Measure wgrad in one format.

    Args:
        operands: the linear's tensors.
        exact: dW without quantization.
        format_name: the format of both operands.
        stream: random numbers for G, where the format rounds it stochastically.
    """
    x, g = operands.input, operands.grad_output
    g_q = _quantized(g, format_name, Operand.GRAD_OUTPUT, Gemm.WGRAD, stream)
    x_q = _quantized(x, format_name, Operand.INPUT, Gemm.WGRAD)
    weight_gradient = matmul_fp32(g_q.t(), x_q).sub_(exact)
    grad_square = squared_norm(g_q.sub_(rotated(g, get_format(format_name), Gemm.WGRAD)))
    return WgradError(weight_gradient, grad_square)


def _quantized(
    tensor: torch.Tensor,
    format_name: str,
    operand: Operand,
    gemm: Gemm,
    stream: StochasticStream | None = None,
) -> torch.Tensor:
    return quantize_dequantize_operand(
        tensor, format_name, operand, gemm, stream=stream, dtype=torch.float32
    )


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


def token_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return each row's <a, b>.

    Args:
        a: [rows, cols], any float dtype.
        b: likewise.

    Returns:
        [rows], FP64 (each row summed in FP32). Only some rows at a time are made FP32.
    """
    step = max(1, _PIECE // max(a.shape[-1], 1))
    pieces = zip(torch.split(a, step), torch.split(b, step), strict=True)
    return torch.cat([(x.float() * y).sum(-1) for x, y in pieces]).double()


_PIECE = 1 << 20
"""Elements that are copied at a time."""
