"""Quantizing a tensor by whichever path suits it: Triton kernels on CUDA, else the reference.

`kernels.dispatch` decides; both paths give the same bits. Payloads are what a native FP8 GEMM
takes: E4M3 bytes (which hold E2M1 and E2M0 values exactly) and FP32 decode scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_snip.formats import Format, ScaleType
from megatron_snip.kernels import dispatch
from megatron_snip.kernels.grid import NO_DRAWS, Draws
from megatron_snip.quantizers import reference
from megatron_snip.quantizers.codes import decode_e4m3, encode_e4m3
from megatron_snip.quantizers.reference import Block, QuantizedTensor
from megatron_snip.quantizers.stream import StochasticStream


@dataclass(frozen=True)
class Payload:
    """A quantized matrix in bytes.

    Attributes:
        codes: uint8 [rows, cols], E4M3 bytes, row-major or column-major as asked for.
        scales: FP32 [ceil(rows / tile rows), ceil(cols / tile cols)], decode scales, row-major or
            column-major as asked for.
        block: (rows, cols) of a tile.
        format: the format's row in the table.
    """

    codes: Tensor
    scales: Tensor
    block: Block
    format: Format

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values * scales, [rows, cols]."""
        values = decode_e4m3(self.codes)
        return QuantizedTensor(values, self.scales, self.block, self.format).dequantize(dtype)


@torch.no_grad()
def quantize(
    x: Tensor,
    fmt: Format,
    block: Block | int,
    *,
    dim: int = -1,
    stream: StochasticStream | None = None,
    tensor_amax: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize to FP32 grid values and scales; see `reference.quantize` for the contract."""
    tile = reference.check(x, fmt, block, dim)
    if not _use_kernels(x, tile, payload=True):
        return reference.quantize(x, fmt, tile, stream=stream, tensor_amax=tensor_amax)
    amax = tensor_amax_of(x, fmt, tensor_amax)

    def run(matrix: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        codes, scales = _launch().quantize_payload(matrix, fmt, tile, draws=draws, tensor_amax=amax)
        return decode_e4m3(codes), scales

    values, scales = _each_matrix(x, tile, stream, run)
    return QuantizedTensor(values, scales, tile, fmt, amax)


@torch.no_grad()
def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block | int,
    *,
    dim: int = -1,
    stream: StochasticStream | None = None,
    tensor_amax: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return what is left of x; see `reference.quantize_dequantize` for the contract."""
    tile = reference.check(x, fmt, block, dim)
    if not _use_kernels(x, tile):
        return reference.quantize_dequantize(
            x, fmt, tile, stream=stream, tensor_amax=tensor_amax, dtype=dtype
        )
    amax = tensor_amax_of(x, fmt, tensor_amax)

    def run(matrix: Tensor, draws: Draws) -> tuple[Tensor]:
        return (
            _launch().quantize_dequantize(
                matrix, fmt, tile, dtype=dtype, draws=draws, tensor_amax=amax
            ),
        )

    return _each_matrix(x, tile, stream, run)[0]


@torch.no_grad()
def quantize_payload(
    x: Tensor,
    fmt: Format,
    block: Block,
    *,
    stream: StochasticStream | None = None,
    tensor_amax: Tensor | None = None,
    transpose: bool = False,
    scales_col_major: bool = False,
) -> Payload:
    """Quantize a matrix to E4M3 bytes and scales.

    Args:
        x: [rows, cols], BF16 or FP32, any strides.
        fmt: a quantized format.
        block: (rows, cols) of a tile.
        stream: random numbers; None rounds to nearest even.
        tensor_amax: for E4M3 scales; None takes x's own.
        transpose: lay the bytes out column-major, so that `codes.T` is contiguous.
        scales_col_major: lay the scales out column-major.

    Raises:
        ValueError: on what `quantize` refuses, or if x is no matrix.
    """
    tile = _check_matrix(x, fmt, block)
    amax = tensor_amax_of(x, fmt, tensor_amax)
    if _use_kernels(x, tile, payload=True):
        codes, scales = _launch().quantize_payload(
            x,
            fmt,
            tile,
            transpose=transpose,
            scales_col_major=scales_col_major,
            draws=_draws(stream, x.shape[1]),
            tensor_amax=amax,
        )
        return Payload(codes, scales, tile, fmt)
    quantized = reference.quantize(x, fmt, tile, stream=stream, tensor_amax=amax)
    codes = _lay_out(encode_e4m3(quantized.values), transpose)
    return Payload(codes, _lay_out(quantized.scales, scales_col_major), tile, fmt)


@torch.no_grad()
def quantize_dequantize_both(
    x: Tensor,
    formats: tuple[Format, Format],
    blocks: tuple[Block, Block],
    *,
    streams: tuple[StochasticStream | None, StochasticStream | None] = (None, None),
    tensor_amax: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize a matrix two ways, from one read where kernels run.

    Args:
        x: [rows, cols].
        formats: the two formats.
        blocks: their tiles, e.g. (1, 128) and (128, 1).
        streams: random numbers of each; both must have one layout.
        tensor_amax: for E4M3 scales.
        dtype: of the results.

    Returns:
        Two [rows, cols] tensors, each bit for bit what `quantize_dequantize` returns.
    """
    tiles = _check_both(x, formats, blocks, streams)
    if not all(_use_kernels(x, tile) for tile in tiles):
        first, second = (
            quantize_dequantize(x, fmt, tile, stream=stream, tensor_amax=tensor_amax, dtype=dtype)
            for fmt, tile, stream in zip(formats, tiles, streams, strict=True)
        )
        return first, second
    pair: tuple[Tensor, Tensor] = _launch().quantize_dequantize_both(
        x,
        formats,
        tiles,
        dtype=dtype,
        draws=_both_draws(streams, x.shape[1]),
        tensor_amax=_shared_amax(x, formats, tensor_amax),
    )
    return pair


@torch.no_grad()
def quantize_payload_both(
    x: Tensor,
    formats: tuple[Format, Format],
    blocks: tuple[Block, Block],
    *,
    streams: tuple[StochasticStream | None, StochasticStream | None] = (None, None),
    tensor_amax: Tensor | None = None,
) -> tuple[Payload, Payload]:
    """Quantize a matrix along the row and along tokens, from one read where kernels run.

    Args:
        x: [rows, cols].
        formats: of the row and of the token direction.
        blocks: their tiles, e.g. (1, 128) and (128, 1).
        streams: random numbers of each; both must have one layout.
        tensor_amax: for E4M3 scales.

    Returns:
        The row direction's payload, codes row-major and scales column-major, and the token
        direction's, codes column-major and scales row-major: the layouts in which a GEMM takes x
        and x^T under 1 x 128 scales.
    """
    tiles = _check_both(x, formats, blocks, streams)
    if not all(_use_kernels(x, tile, payload=True) for tile in tiles):
        row, col = (
            quantize_payload(
                x,
                fmt,
                tile,
                stream=stream,
                tensor_amax=tensor_amax,
                transpose=transpose,
                scales_col_major=not transpose,
            )
            for fmt, tile, stream, transpose in zip(
                formats, tiles, streams, (False, True), strict=True
            )
        )
        return row, col
    outputs = _launch().quantize_payload_both(
        x,
        formats,
        tiles,
        draws=_both_draws(streams, x.shape[1]),
        tensor_amax=_shared_amax(x, formats, tensor_amax),
    )
    row, col = (
        Payload(codes, scales, tile, fmt)
        for (codes, scales), tile, fmt in zip(outputs, tiles, formats, strict=True)
    )
    return row, col


def tensor_amax_of(x: Tensor, fmt: Format, given: Tensor | None) -> Tensor | None:
    """The FP32 scalar that E4M3 scales need: `given`, or x's own; None for other scales."""
    if fmt.scale is not ScaleType.E4M3 or given is not None or not _use_kernels(x, (1, 1)):
        return reference.tensor_amax_of(x, fmt, given)
    parts = [_launch().moments(matrix)[0] for matrix in reference.matrices(x)]
    return torch.stack(parts).amax() if parts else torch.zeros((), device=x.device)


def _shared_amax(x: Tensor, formats: tuple[Format, Format], given: Tensor | None) -> Tensor | None:
    for fmt in formats:
        amax = tensor_amax_of(x, fmt, given)
        if amax is not None:
            return amax
    return None


def _use_kernels(x: Tensor, tile: Block, *, payload: bool = False) -> bool:
    return dispatch.choose(x.device, tile, payload=payload).path is dispatch.Path.TRITON


def _launch() -> Any:
    """The launching functions; importing them imports Triton."""
    from megatron_snip.kernels import launch

    return launch


def _draws(stream: StochasticStream | None, cols: int) -> Draws:
    """A stream in the plain numbers that kernels take."""
    if stream is None:
        return NO_DRAWS
    places = stream.layout.column_map(cols)
    word = stream.key.word
    whole = places.local_chunk == places.global_cols
    return Draws(
        key=word - 2**64 if word >= 2**63 else word,
        global_cols=places.global_cols,
        local_chunk=places.local_chunk,
        global_chunk=places.global_chunk,
        col_start=places.col_start,
        row_start=places.row_start,
        mode=(1 if whole else 2) if places.aligned else 3,
    )


def _both_draws(
    streams: tuple[StochasticStream | None, StochasticStream | None], cols: int
) -> tuple[Draws, Draws]:
    return _draws(streams[0], cols), _draws(streams[1], cols)


def _each_matrix(
    x: Tensor,
    tile: Block,
    stream: StochasticStream | None,
    run: Callable[[Tensor, Draws], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Run a kernel over [.., rows, cols], each result with x's leading dims."""
    cols = x.shape[-1]
    if x.dim() == 2:
        return run(x, _draws(stream, cols))
    leading = x.shape[:-2]
    if tile[0] == 1:  # rows are independent
        results = run(x.reshape(-1, cols), _draws(stream, cols))
        return tuple(part.view(*leading, x.shape[-2], part.shape[-1]) for part in results)
    parts = []
    for index, matrix in enumerate(reference.matrices(x)):
        parts.append(run(matrix, _draws(_shifted(stream, index * x.shape[-2]), cols)))
    if not parts:
        empty = run(x.new_empty(x.shape[-2:]), NO_DRAWS)
        return tuple(part.new_empty(*leading, *part.shape) for part in empty)
    stacked = (torch.stack(results) for results in zip(*parts, strict=True))
    return tuple(part.view(*leading, *part.shape[1:]) for part in stacked)


def _shifted(stream: StochasticStream | None, rows: int) -> StochasticStream | None:
    if stream is None:
        return None
    layout = replace(stream.layout, row_start=stream.layout.row_start + rows)
    return replace(stream, layout=layout)


def _lay_out(matrix: Tensor, col_major: bool) -> Tensor:
    return matrix.T.contiguous().T if col_major else matrix


def _check_matrix(x: Tensor, fmt: Format, block: Block) -> Block:
    tile = reference.check(x, fmt, block, -1)
    if x.dim() != 2:
        raise ValueError(f"this takes a matrix, got shape {tuple(x.shape)}; flatten first")
    return tile


def _check_both(
    x: Tensor,
    formats: tuple[Format, Format],
    blocks: tuple[Block, Block],
    streams: tuple[StochasticStream | None, StochasticStream | None],
) -> tuple[Block, Block]:
    if streams[0] and streams[1] and streams[0].layout != streams[1].layout:
        raise ValueError("both streams of one tensor must have the same layout")
    first, second = (_check_matrix(x, f, b) for f, b in zip(formats, blocks, strict=True))
    return first, second
