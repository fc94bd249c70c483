"""fprop, dgrad and wgrad of one linear on FP8 tensor cores (`native`).

    fprop   Y  = Q(X) Q(W)^T      dgrad   dX = Q(G) Q(W)      wgrad   dW = Q(G)^T Q(X)

Operands are those of `gemms` bit for bit, as E4M3 bytes and scales (`native_gemm`); only the
order (and, on a device, the width) of the accumulation differs. X is quantized for fprop and
wgrad in one read in the forward, so that the backward's copy waits in one byte an element; G for
dgrad and wgrad in one read in the backward.

Difference from `simulate`, for Y = sum of products p_i over the contraction of length L: both
round to the output's dtype once, and before that

    |native - simulate| <= EMULATION_ULPS * (128 + L / 128) 2^-24 sum |p_i|      on the CPU
    |native - simulate| <= DEVICE_TOLERANCE sum |p_i|                            on a GPU

The first is what FP32 summation in blocks of 128 allows, once for each of the two. The second:
Hopper's tensor cores align the 32 products of an FP8 instruction, and the sum so far, to the
largest of them, and cut each off at 2^-13 of its power of two (about 14 bits, sign-filled:
DeepSeek-V3, arXiv:2412.19437, Sec. 3.3.2); every 128, four instructions, the sum is promoted to
FP32. It is a worst case, reached to a third where few products outweigh the rest; sums of FP4's
products are exact below 4096 (of at most 4608).

M tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.linears.native_gemm import TILE, GemmOperand, multiply, operand
from megatron_snip.options import Option
from megatron_snip.quantizers import StochasticStream
from megatron_snip.quantizers.pair import quantize_payload_operand, quantize_payload_pair
from megatron_snip.types import Gemm, Operand

EMULATION_ULPS = 2.0
"""One for each of the sums compared, `native` on the CPU and `simulate`."""

DEVICE_TOLERANCE = 4 * (32 + 1) * 2.0**-13
"""Relative to the sum of the products' magnitudes; see the file's description."""

KeepForm = Callable[[Any, Callable[[], GemmOperand]], GemmOperand]


def input_operands(
    x: Tensor, option: Option, fprop: bool, wgrad: bool
) -> tuple[GemmOperand | None, GemmOperand | None]:
    """Return X for fprop, A [M, K], and for wgrad, B [K, M]; from one read where both are wanted.

    Args:
        x: [M, K], BF16 or FP32.
        option: decides the formats.
        fprop: whether fprop's is wanted.
        wgrad: whether wgrad's is wanted.
    """
    return _both(x, option, Operand.INPUT, Gemm.FPROP if fprop else None, wgrad, None)


def grad_operands(
    g: Tensor, option: Option, stream: StochasticStream, dgrad: bool, wgrad: bool
) -> tuple[GemmOperand | None, GemmOperand | None]:
    """Return G for dgrad, A [M, N], and for wgrad, A [N, M]; from one read where both are wanted.

    Args:
        g: [M, N], BF16 or FP32.
        option: decides the formats.
        stream: random numbers, where the format rounds G stochastically.
        dgrad: whether dgrad's is wanted.
        wgrad: whether wgrad's is wanted.
    """
    return _both(g, option, Operand.GRAD_OUTPUT, Gemm.DGRAD if dgrad else None, wgrad, stream)


def weight_operand(w: Tensor, option: Option, gemm: Gemm, keep: KeepForm) -> GemmOperand:
    """Return W for fprop, B [N, K], or for dgrad, B [K, N].

    Args:
        w: [N, K].
        option: decides the format.
        gemm: fprop or dgrad.
        keep: keeps what was made for the rest of the step.
    """
    name = option[gemm]
    transpose = gemm is Gemm.DGRAD

    def make() -> GemmOperand:
        payload = quantize_payload_operand(w, name, Operand.WEIGHT, gemm, transpose=transpose)
        return operand(payload, transpose)

    return keep(("native", name, gemm), make)


def fprop(x: GemmOperand, w: GemmOperand, dtype: torch.dtype) -> Tensor:
    """Return Y [M, N]."""
    return multiply(x, w, dtype)


def dgrad(g: GemmOperand, w: GemmOperand, dtype: torch.dtype) -> Tensor:
    """Return dX [M, K]."""
    return multiply(g, w, dtype)


def wgrad(g: GemmOperand, x: GemmOperand) -> Tensor:
    """Return dW [N, K] in FP32."""
    return multiply(g, x, torch.float32)


def tiles_fit_shards(tokens: int) -> bool:
    """Whether tiles along tokens end where a shard of this many tokens does.

    Then quantizing a sequence-parallel shard and gathering bytes gives the bits of gathering first.
    """
    return tokens % TILE == 0


def gather_rows(shard: GemmOperand, group: dist.ProcessGroup) -> GemmOperand:
    """Gather an A operand [M, K] of sequence-parallel shards, one byte an element; padded never.

    Args:
        shard: [M / ranks, K], 1 x 128 scales; `tiles_fit_shards`.
        group: the tensor axis.
    """
    assert not shard.square and shard.codes.shape[0] == shard.rows
    codes, _ = _gathered(shard.codes, group)
    scales, _ = _gathered(shard.scales.contiguous(), group)
    rows = codes.shape[0]
    laid_out = torch.empty_strided(
        scales.shape, (1, rows), dtype=scales.dtype, device=scales.device
    ).copy_(scales)
    return GemmOperand(codes, laid_out, rows, shard.depth, square=False)


class GatheringTokens:
    """A B operand [K, M] on its way from sequence-parallel shards [K, M / ranks]."""

    def __init__(self, shard: GemmOperand, group: dist.ProcessGroup) -> None:
        """All ranks of `group`: start gathering; `tiles_fit_shards` must hold."""
        assert not shard.square and shard.codes.shape[1] == shard.depth
        self._shard = shard
        self._ranks = group.size()
        self._codes, codes_work = _gathered(shard.codes, group, async_op=True)
        # in memory a block's rows lie together, so shards follow one another
        self._scales, scales_work = _gathered(shard.scales.t(), group, async_op=True)
        self._works = (codes_work, scales_work)

    def wait(self) -> GemmOperand:
        """Return the whole operand."""
        for work in self._works:
            work.wait()
        rows, depth = self._shard.codes.shape
        parts = self._codes.view(self._ranks, rows, depth)
        codes = parts.transpose(0, 1).reshape(rows, self._ranks * depth)
        whole = self._shard.depth * self._ranks
        return GemmOperand(codes, self._scales.t(), self._shard.rows, whole, square=False)


def _gathered(
    shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> tuple[Tensor, Any]:
    whole = shard.new_empty((group.size() * shard.shape[0], *shard.shape[1:]))
    work = dist.all_gather_into_tensor(whole, shard, group=group, async_op=async_op)
    return whole, work


def _both(
    tensor: Tensor,
    option: Option,
    role: Operand,
    row_gemm: Gemm | None,
    wgrad: bool,
    stream: StochasticStream | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:
    """Return (the row's operand, the tokens' operand), each if wanted."""
    if row_gemm is not None and wgrad:
        formats = (option[row_gemm], option[Gemm.WGRAD])
        row, tokens = quantize_payload_pair(tensor, formats, role, stream=stream)
        return operand(row), operand(tokens, transpose=True)
    if row_gemm is not None:
        row = quantize_payload_operand(
            tensor, option[row_gemm], role, row_gemm, stream=stream, scales_col_major=True
        )
        return operand(row), None
    if wgrad:
        tokens = quantize_payload_operand(
            tensor, option[Gemm.WGRAD], role, Gemm.WGRAD, stream=stream, transpose=True
        )
        return None, operand(tokens, transpose=True)
    return None, None
