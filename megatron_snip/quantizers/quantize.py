"""Quantizing an operand of a GEMM: its tiles, its rounding, and kernels or reference.

Tiles run along the contraction dimension, so the same tensor is tiled differently in two GEMMs. In
a tensor's own [rows, cols], with `t` the format's tile and (r, c) its weight block:

    fprop  input       [M, K]  (1, t)         weight  [N, K]  (r, c)
    dgrad  grad_output [M, N]  (1, t)         weight  [N, K]  (c, r)
    wgrad  grad_output [M, N]  (t, 1)         input   [M, K]  (t, 1)

With a square weight block one quantized weight serves both fprop and dgrad. grad_output is rounded
stochastically in formats that ask for it, everything else to nearest even. A format with
`wgrad_hadamard` (Transformer Engine's NVFP4 recipe) first applies a Hadamard transform to both
operands of wgrad, in statistics and in simulated linears alike (`rotated`). It leaves their product
unchanged.

Triton kernels quantize where they can run (`kernels.launch.obstacle`), else the reference does, to
the same bits.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Block, Format, get_format
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import NO_RANDOM, PhiloxArguments
from megatron_snip.quantizers import reference
from megatron_snip.quantizers.stochastic import StochasticStream, random_bits16
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand

_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of the Hadamard transform of 16 tokens in Transformer Engine (get_wgrad_sign_vector)."""


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
    """Return whether the format rounds this operand stochastically (and so needs a stream)."""
    return fmt.stochastic_grad and operand is Operand.GRAD_OUTPUT


@lru_cache(maxsize=64)
def operand_format(fmt: Format, operand: Operand) -> Format:
    """Return the format that an operand takes: its gradients may have another element type."""
    if fmt.grad_element is None:
        return fmt
    element = fmt.grad_element if operand is Operand.GRAD_OUTPUT else fmt.element
    return replace(fmt, element=element, grad_element=None)


def rotated(x: Tensor, fmt: Format, gemm: Gemm) -> Tensor:
    """Return the [tokens, cols] that `gemm` quantizes: x, or its Hadamard transform (FP32).

    With H the Sylvester-Hadamard matrix of size n over sqrt(n), and D a diagonal of random signs,
    each group v of n tokens is replaced by R v with R = H D. R is orthonormal, so

        (R G)^T (R X) = G^T X

    holds up to rounding, while an outlier token spreads over its group before quantization. Tokens
    after the last complete group are not transformed. Results are rounded to BF16. Source: NVIDIA,
    arXiv:2509.25149 (n = 16, one sign vector for all linears), and Transformer Engine 2.20.
    """
    size = fmt.wgrad_hadamard
    if gemm is not Gemm.WGRAD or not size:
        return x
    complete = x.shape[0] - x.shape[0] % size
    out = x.to(torch.float32, copy=True)
    if complete:
        groups = out[:complete].view(-1, size, x.shape[1])
        mixed = hadamard_matrix(size, x.device) @ groups
        out[:complete] = mixed.bfloat16().view(complete, x.shape[1])
    return out


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a measurement may ask first, and training takes the same tensor
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Return R = H D: [size, size], FP32; the same on every device; size is a power of two."""
    rows = torch.ones(1, 1, device=device)
    while rows.shape[0] < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)], 0)
    if size == len(_SIGNS):
        signs = torch.tensor(_SIGNS, dtype=torch.float32, device=device)
    else:
        counters = torch.arange(-(-size // 8), device=device)
        bits = random_bits16(counters, key=0).flatten()[:size]
        signs = torch.where(bits < 0, -1.0, 1.0)
    return rows.mul(signs).mul(size**-0.5)


@torch.no_grad()
def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    *,
    stream: StochasticStream | None = None,
    amax_or_scale: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return a matrix quantized and dequantized; `reference.quantize_dequantize` has the contract.

    Differences: `stream` instead of `bits16`, None for `amax_or_scale` takes x's own, and kernels
    quantize where they can run. They compute the scales themselves.
    """
    reference.check(x, fmt, block)
    amax_or_scale = reference.amax_or_scale_of(x, amax_or_scale, fmt)
    if not launch.use_kernels(x.device, block):
        bits16 = None if stream is None else stream.bits16(x.shape[0], x.shape[1], x.device)
        return reference.quantize_dequantize(
            x, fmt, block, bits16=bits16, amax_or_scale=amax_or_scale, scales=scales, dtype=dtype
        )
    random = philox_arguments(stream, x.shape[1])
    return launch.quantize_dequantize(
        x, fmt, block, random, dtype=dtype, amax_or_scale=amax_or_scale
    )


def quantize_dequantize_operand(
    x: Tensor,
    fmt: str | Format,
    operand: Operand,
    gemm: Gemm,
    *,
    stream: StochasticStream | None = None,
    amax_or_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `gemm` sees of `operand`: quantized and dequantized.

    Args:
        x: [.., cols], BF16 or FP32, any strides; leading dims are flattened to rows (tokens).
        fmt: the format or its name; bf16 returns x itself.
        operand: what x is.
        gemm: what it enters.
        stream: the tensor's random numbers, needed for stochastic rounding.
        amax_or_scale: FP32 scalar, needed where `Format.needs_amax_or_scale`: the tensor's largest
            magnitude, or for delayed scaling its scale. None takes x's own largest magnitude.
        dtype: dtype of a quantized result; None is x's own.

    Returns:
        x's shape.

    Raises:
        ValueError: if stochastic rounding is due and there is no stream, if `operand` does not
            enter `gemm`, or on a dtype that cannot be quantized.
    """
    fmt = _format_of(fmt, operand)
    if not fmt.quantized:
        return x
    source = rotated(x.detach().flatten(0, -2), fmt, gemm)
    out = quantize_dequantize(
        source,
        fmt,
        operand_block(fmt, operand, gemm),
        stream=_stream_of(fmt, operand, gemm, stream),
        amax_or_scale=amax_or_scale,
        dtype=dtype or x.dtype,
    )
    return out.view(x.shape)


@torch.no_grad()
def quantize_dequantize_pair(
    x: Tensor,
    formats: tuple[str | Format, str | Format],
    operand: Operand,
    *,
    stream: StochasticStream | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what two GEMMs see of `operand`.

    The results are bit for bit those of two calls of `quantize_dequantize_operand`, whose
    arguments these are. What both need is computed once: the largest magnitude of x, and the
    random numbers where the reference quantizes (kernels draw them on the way).

    Args:
        x: The operand, [.., cols].
        formats: The formats of the first GEMM (fprop of input, dgrad of grad_output) and of wgrad.
        operand: Input or grad_output.
        stream: The random numbers, where a format rounds stochastically.
        dtype: The dtype of the quantized results; None is x's own.

    Returns:
        Two tensors of x's shape: for the first GEMM, and for wgrad.
    """
    first, wgrad = (_format_of(fmt, operand) for fmt in formats)
    first_gemm = Gemm.FPROP if operand is Operand.INPUT else Gemm.DGRAD

    if stream is not None and is_stochastic(first, operand) and is_stochastic(wgrad, operand):
        first_block = operand_block(first, operand, first_gemm)
        wgrad_block = operand_block(wgrad, operand, Gemm.WGRAD)
        if not launch.use_kernels(x.device, first_block, wgrad_block):
            stream = stream.draw(x.shape[:-1].numel(), x.shape[-1], x.device)
    first_amax = reference.amax_or_scale_of(x, None, first)
    # A Hadamard transform gives wgrad another tensor, with another largest magnitude.
    wgrad_amax = None if wgrad.wgrad_hadamard else first_amax

    for_first = quantize_dequantize_operand(
        x, first, operand, first_gemm, stream=stream, amax_or_scale=first_amax, dtype=dtype
    )
    for_wgrad = quantize_dequantize_operand(
        x, wgrad, operand, Gemm.WGRAD, stream=stream, amax_or_scale=wgrad_amax, dtype=dtype
    )
    return for_first, for_wgrad


def _format_of(fmt: str | Format, operand: Operand) -> Format:
    """Return what an operand takes in a format, which may be given by name."""
    return operand_format(get_format(fmt) if isinstance(fmt, str) else fmt, operand)


class Prepared(NamedTuple):
    """A matrix and how it is quantized.

    Attributes:
        x: [rows, cols].
        fmt: its own format.
        block: (rows, cols) of a tile.
        stream: None rounds to nearest even.
        amax_or_scale: None if the format needs none.
    """

    x: Tensor
    fmt: Format
    block: Block
    stream: StochasticStream | None
    amax_or_scale: Tensor | None


def prepare(
    x: Tensor,
    fmt: Format,
    operand: Operand,
    gemm: Gemm,
    stream: StochasticStream | None,
    amax_or_scale: Tensor | None,
) -> Prepared:
    """Return how an operand is quantized, and check it.

    Args:
        x: [rows, cols]; for wgrad what `rotated` returns.
        fmt: the format of the GEMM.
        operand: what x is.
        gemm: what it enters.
        stream: as in `quantize_dequantize_operand`.
        amax_or_scale: as in `quantize_dequantize_operand`.

    Raises:
        ValueError: as `quantize_dequantize_operand` does.
    """
    own = operand_format(fmt, operand)
    block = operand_block(own, operand, gemm)
    reference.check(x, own, block)
    random = _stream_of(own, operand, gemm, stream)
    return Prepared(x, own, block, random, reference.amax_or_scale_of(x, amax_or_scale, own))


def _stream_of(
    fmt: Format, operand: Operand, gemm: Gemm, stream: StochasticStream | None
) -> StochasticStream | None:
    """Return the stream to round with; None rounds to nearest even."""
    if not is_stochastic(fmt, operand):
        return None
    if stream is None:
        raise ValueError(f"{operand} in {fmt.name} is rounded stochastically and needs a stream")
    return stream.for_gemm(gemm)


def philox_arguments(stream: StochasticStream | None, cols: int) -> PhiloxArguments:
    """Return where a kernel draws the random numbers of a local tensor with `cols` columns."""
    if stream is None:
        return NO_RANDOM
    columns = stream.column_map(cols)
    has_all_columns = columns.local_chunk == columns.global_cols
    if not columns.aligned:
        mode = launch.UNALIGNED
    elif has_all_columns and stream.first_row == 0:
        mode = launch.UNSHARDED
    else:
        mode = launch.SHARDED
    word = stream.key.word
    signed = word - 2**64 if word >= 2**63 else word  # Triton's integers are signed
    # The kernel counts rows from 0, so the elements of the rows before are skipped as columns.
    skipped = stream.first_row * columns.global_cols
    columns = columns._replace(col_start=columns.col_start + skipped)
    return PhiloxArguments(signed, columns, mode, stream.swapped)
