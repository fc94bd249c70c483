"""What the kernels' benchmark times, and whether a device's bits are the CPU's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.timing import said
from megatron_snip.formats import FORMATS, Block, Format
from megatron_snip.quantizers.quantize import quantize_dequantize
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.types import Gemm

FP8, FP4 = FORMATS["fp8"], FORMATS["fp4"]
ROW, TOKENS, SQUARE = (1, 128), (128, 1), (128, 128)
STREAM = StochasticStream(StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0))

Work = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        name: what the table shows.
        work: runs it on a BF16 matrix.
        goal: least fraction of the copy's bandwidth, or None.
    """

    name: str
    work: Work
    goal: float | None = None


def cases() -> list[Case]:
    """Return what is timed: reads of BF16 and writes of BF16."""

    def one(fmt: Format, block: Block, stream: StochasticStream | None = None) -> Work:
        return lambda x: quantize_dequantize(x, fmt, block, stream=stream, dtype=torch.bfloat16)

    return [
        Case("fp8 1x128", one(FP8, ROW), 0.85),
        Case("fp8 128x1", one(FP8, TOKENS), 0.85),
        Case("fp8 128x128", one(FP8, SQUARE), 0.85),
        Case("fp4 1x128", one(FP4, ROW), 0.85),
        Case("fp4 128x1", one(FP4, TOKENS), 0.85),
        Case("mxfp4 1x32", one(FORMATS["mxfp4"], (1, 32)), 0.85),
        Case("fp4 1x128, stochastic", one(FP4, ROW, STREAM)),
        Case("fp4 128x1, stochastic", one(FP4, TOKENS, STREAM.for_gemm(Gemm.WGRAD))),
    ]


def check_bits(device: torch.device) -> list[str]:
    """Names of the cases whose output on `device` differs from the CPU's, on a ragged matrix."""
    torch.manual_seed(0)
    x = torch.randn(517, 1037).mul_(torch.exp2(torch.randint(-20, 20, (517, 1)))).bfloat16()
    x[3, 5], x[100, 1000] = float("nan"), float("inf")
    return [case.name for case in cases() if not _agrees(case, x, device)]


def _agrees(case: Case, x: torch.Tensor, device: torch.device) -> bool:
    """Whether a case's output on a device is the CPU's; a failure is no agreement, and shown."""
    try:
        return same(case.work(x.to(device)), case.work(x))
    except Exception as error:  # the other cases go on
        print(f"{case.name} on {device}: {said(error)}", file=sys.stderr)
        return False


def same(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether all bits are equal; NaN equals NaN."""
    return torch.equal(ours.cpu().float().nan_to_num(7e37), wanted.float().nan_to_num(7e37))
