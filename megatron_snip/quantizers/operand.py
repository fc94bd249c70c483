"""Quantizing an operand of a GEMM: which tiles, along which dim, rounded how.

Tiles run along the contraction dim, so the same tensor is tiled differently in two GEMMs. In a
tensor's own [rows, cols], with `t` the format's tile and (r, c) its weight block:

    fprop  input       [M, K]  (1, t)         weight  [N, K]  (r, c)
    dgrad  grad_output [M, N]  (1, t)         weight  [N, K]  (c, r)
    wgrad  grad_output [M, N]  (t, 1)         input   [M, K]  (t, 1)

A square weight block makes one quantized weight serve both fprop and dgrad. grad_output is
rounded stochastically in formats that ask for it, everything else to nearest even. Formats with a
Hadamard transform rotate wgrad's operands first, both alike, which their product does not see.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from megatron_snip.formats import Format, ScaleType, get_format
from megatron_snip.quantizers.hadamard import HadamardTransform
from megatron_snip.quantizers.reference import Block, QuantizedTensor
from megatron_snip.quantizers.routes import quantize, quantize_dequantize
from megatron_snip.quantizers.stream import StochasticStream
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand


class Rounding(StrEnum):
    """How an operand is rounded."""

    AUTO = "auto"
    """As the format says: stochastic for grad_output where `stochastic_grad`, else nearest."""
    NEAREST_EVEN = "nearest-even"
    STOCHASTIC = "stochastic"


def operand_block(fmt: Format, operand: Operand, gemm: Gemm) -> Block:
    """Return (rows, cols) of a tile in the operand's own [rows, cols].

    Raises:
        ValueError: if `operand` does not enter `gemm`.
    """
    if operand not in GEMM_OPERANDS[gemm]:
        raise ValueError(f"{operand} does not enter {gemm}")
    if operand is Operand.WEIGHT:
        rows, cols = fmt.weight_block
        return (rows, cols) if gemm is Gemm.FPROP else (cols, rows)
    return (fmt.tile, 1) if gemm is Gemm.WGRAD else (1, fmt.tile)


def is_stochastic(fmt: Format, operand: Operand) -> bool:
    """Whether the format rounds this operand stochastically (and so needs a stream)."""
    return fmt.stochastic_grad and operand is Operand.GRAD_OUTPUT


def needs_tensor_amax(fmt: Format) -> bool:
    """Whether the largest magnitude over all of a tensor's shards must be known beforehand."""
    return fmt.scale is ScaleType.E4M3


def quantize_operand(
    x: Tensor,
    format_name: str | Format,
    operand: Operand,
    gemm: Gemm,
    *,
    stream: StochasticStream | None = None,
    rounding: Rounding = Rounding.AUTO,
    tensor_amax: Tensor | None = None,
    hadamard: HadamardTransform | None = None,
) -> QuantizedTensor:
    """Quantize `operand` as it enters `gemm`.

    Args:
        x: [.., cols], BF16 or FP32, any strides; leading dims are flattened to rows (tokens).
        format_name: a quantized format, or its name.
        operand: what x is.
        gemm: what it enters.
        stream: the tensor's random numbers; its role is set here. Needed for stochastic rounding.
        rounding: AUTO follows the format.
        tensor_amax: FP32 scalar, see `needs_tensor_amax`; None takes x's own.
        hadamard: rotate tokens first; only for wgrad, and the same for both its operands; None
            takes the format's, if it has one.

    Returns:
        The quantized [rows, cols] matrix.

    Raises:
        ValueError: if stochastic rounding is due and there is no stream; on a Hadamard transform
            outside wgrad; on what `quantize` refuses.
    """
    fmt = resolve(format_name)
    source, block, used = prepare(x, fmt, operand, gemm, stream, rounding, hadamard)
    return quantize(source, fmt, block, stream=used, tensor_amax=tensor_amax)


def quantize_dequantize_operand(
    x: Tensor,
    format_name: str | Format,
    operand: Operand,
    gemm: Gemm,
    *,
    stream: StochasticStream | None = None,
    rounding: Rounding = Rounding.AUTO,
    tensor_amax: Tensor | None = None,
    hadamard: HadamardTransform | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `gemm` sees of `operand`: quantized and dequantized.

    Arguments are those of `quantize_operand`; bf16 returns x itself (detached, cast to `dtype`).

    Args:
        x: [.., cols].
        format_name: the format or its name; bf16 is allowed.
        operand: what x is.
        gemm: what it enters.
        stream: random numbers.
        rounding: how to round.
        tensor_amax: for E4M3 scales.
        hadamard: rotation of tokens for wgrad; None takes the format's, if it has one.
        dtype: of the result; None is x's own.

    Returns:
        x's shape.
    """
    fmt = resolve(format_name)
    dtype = x.dtype if dtype is None else dtype
    if not fmt.quantized:
        return x.detach().to(dtype)
    source, block, used = prepare(x, fmt, operand, gemm, stream, rounding, hadamard)
    out = quantize_dequantize(source, fmt, block, stream=used, tensor_amax=tensor_amax, dtype=dtype)
    return out.view(x.shape)


def resolve(format_name: str | Format) -> Format:
    """Return the format that a name, or a format, stands for."""
    return format_name if isinstance(format_name, Format) else get_format(format_name)


def rotated(x: Tensor, fmt: Format, gemm: Gemm) -> Tensor:
    """Return the [tokens, cols] that `gemm` quantizes in a format: x, or for wgrad R x, FP32."""
    if gemm is not Gemm.WGRAD or not fmt.wgrad_hadamard:
        return x
    return HadamardTransform(fmt.wgrad_hadamard).apply(x)


def prepare(
    x: Tensor,
    fmt: Format,
    operand: Operand,
    gemm: Gemm,
    stream: StochasticStream | None,
    rounding: Rounding,
    hadamard: HadamardTransform | None,
) -> tuple[Tensor, Block, StochasticStream | None]:
    """Return the [rows, cols] matrix to quantize, its tile and the stream to round with."""
    block = operand_block(fmt, operand, gemm)
    source = x.detach().flatten(0, -2)
    if hadamard is not None and gemm is not Gemm.WGRAD:
        raise ValueError(f"a Hadamard transform runs along tokens, for wgrad; got {gemm}")
    source = source if hadamard is None else hadamard.apply(source)
    if hadamard is None:
        source = rotated(source, fmt, gemm)
    stochastic = rounding is Rounding.STOCHASTIC or (
        rounding is Rounding.AUTO and is_stochastic(fmt, operand)
    )
    if not stochastic:
        return source, block, None
    if stream is None:
        raise ValueError(
            f"{operand} in {fmt.name} rounds stochastically: give a stream, or round to "
            "nearest even on purpose"
        )
    return source, block, stream.for_role(operand, gemm)
