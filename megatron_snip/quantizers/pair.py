"""One operand for two GEMMs at once: along its row for one, along tokens for wgrad.

    input        fprop  [M, K] 1 x t      and  wgrad  t x 1
    grad_output  dgrad  [M, N] 1 x t      and  wgrad  t x 1

Where kernels run, both come from one read of the tensor; the results are bit for bit those of two
single calls (`operand`), and so are the random numbers: each copy has its own role.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quantizers.operand import (
    Rounding,
    prepare,
    quantize_dequantize_operand,
    resolve,
)
from megatron_snip.quantizers.routes import (
    Payload,
    quantize_dequantize_both,
    quantize_payload,
    quantize_payload_both,
)
from megatron_snip.quantizers.stream import StochasticStream
from megatron_snip.types import Gemm, Operand

ROW_GEMM: dict[Operand, Gemm] = {Operand.INPUT: Gemm.FPROP, Operand.GRAD_OUTPUT: Gemm.DGRAD}
"""The GEMM that contracts an operand along its rows; wgrad contracts it along tokens."""

Formats = tuple[str | Format, str | Format]
"""Formats of (the row's GEMM, wgrad), by name or row of the table."""


def quantize_dequantize_pair(
    x: Tensor,
    formats: Formats,
    operand: Operand,
    *,
    stream: StochasticStream | None = None,
    rounding: Rounding = Rounding.AUTO,
    tensor_amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what fprop (or dgrad) and wgrad see of `operand`.

    Args:
        x: [.., cols], BF16 or FP32; leading dims are tokens.
        formats: (format in fprop or dgrad, format in wgrad); bf16 leaves a copy alone.
        operand: input or grad_output.
        stream: random numbers, where grad_output is rounded stochastically.
        rounding: AUTO follows the formats.
        tensor_amax: for E4M3 scales.
        dtype: of the results; None is x's own.

    Returns:
        Two tensors of x's shape.
    """
    gemm = ROW_GEMM[operand]
    fmt_a, fmt_b = (resolve(name) for name in formats)
    if not (fmt_a.quantized and fmt_b.quantized) or fmt_b.wgrad_hadamard:
        first, second = (
            quantize_dequantize_operand(
                x,
                fmt,
                operand,
                which,
                stream=stream,
                rounding=rounding,
                tensor_amax=tensor_amax,
                dtype=dtype,
            )
            for fmt, which in ((fmt_a, gemm), (fmt_b, Gemm.WGRAD))
        )
        return first, second
    source, block_a, stream_a = prepare(x, fmt_a, operand, gemm, stream, rounding, None)
    _, block_b, stream_b = prepare(x, fmt_b, operand, Gemm.WGRAD, stream, rounding, None)
    a, b = quantize_dequantize_both(
        source,
        (fmt_a, fmt_b),
        (block_a, block_b),
        streams=(stream_a, stream_b),
        tensor_amax=tensor_amax,
        dtype=x.dtype if dtype is None else dtype,
    )
    return a.view(x.shape), b.view(x.shape)


def quantize_payload_pair(
    x: Tensor,
    formats: Formats,
    operand: Operand,
    *,
    stream: StochasticStream | None = None,
    rounding: Rounding = Rounding.AUTO,
    tensor_amax: Tensor | None = None,
) -> tuple[Payload, Payload]:
    """Return `operand`'s payloads for fprop (or dgrad) and for wgrad.

    Arguments as in `quantize_dequantize_pair`; both formats must be quantized.

    Args:
        x: [.., cols].
        formats: (format in fprop or dgrad, format in wgrad).
        operand: input or grad_output.
        stream: random numbers.
        rounding: how to round.
        tensor_amax: for E4M3 scales.

    Returns:
        (row-major codes with column-major scales, column-major codes with row-major scales), each
        indexed as the [tokens, cols] matrix: a GEMM takes the first as it is and the second's
        `.T`.
    """
    gemm = ROW_GEMM[operand]
    fmt_a, fmt_b = (resolve(name) for name in formats)
    assert not fmt_b.wgrad_hadamard, "wgrad's operand is another tensor then"
    source, block_a, stream_a = prepare(x, fmt_a, operand, gemm, stream, rounding, None)
    _, block_b, stream_b = prepare(x, fmt_b, operand, Gemm.WGRAD, stream, rounding, None)
    return quantize_payload_both(
        source,
        (fmt_a, fmt_b),
        (block_a, block_b),
        streams=(stream_a, stream_b),
        tensor_amax=tensor_amax,
    )


def quantize_payload_operand(
    x: Tensor,
    format_name: str | Format,
    operand: Operand,
    gemm: Gemm,
    *,
    stream: StochasticStream | None = None,
    rounding: Rounding = Rounding.AUTO,
    tensor_amax: Tensor | None = None,
    transpose: bool = False,
    scales_col_major: bool = False,
) -> Payload:
    """Return `operand`'s payload as it enters `gemm`.

    Args:
        x: [.., cols], BF16 or FP32; leading dims are tokens.
        format_name: a quantized format.
        operand: what x is.
        gemm: what it enters.
        stream: random numbers.
        rounding: how to round.
        tensor_amax: for E4M3 scales.
        transpose: lay the bytes out column-major.
        scales_col_major: lay the scales out column-major.
    """
    fmt = resolve(format_name)
    source, block, used = prepare(x, fmt, operand, gemm, stream, rounding, None)
    return quantize_payload(
        source,
        fmt,
        block,
        stream=used,
        tensor_amax=tensor_amax,
        transpose=transpose,
        scales_col_major=scales_col_major,
    )
