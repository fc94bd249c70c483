"""What the kernels' benchmark times, and whether a device's bits are the CPU's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.timing import said
from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import (
    StochasticStream,
    StreamKey,
    error_norms,
    moments,
    quantize_dequantize,
    quantize_dequantize_both,
    quantize_payload,
    quantize_payload_both,
)

FP8, FP4 = FORMATS["fp8"], FORMATS["fp4"]
ROW, TOKENS, SQUARE = (1, 128), (128, 1), (128, 128)
STREAM = StochasticStream(StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0, "benchmark"))
OTHER = StochasticStream(StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0, "benchmark.b"))

Work = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        name: what the table shows.
        work: runs it on a BF16 matrix.
        bytes_per_element: what must be moved, scales included.
        goal: least fraction of the copy's bandwidth, or None.
    """

    name: str
    work: Work
    bytes_per_element: float
    goal: float | None = None


def cases() -> list[Case]:
    """What is timed; a scale costs 4 bytes for 128 elements of a 1-D tile."""
    scale = 4 / 128
    norms = ((FP8, ROW), (FP4, ROW))
    bf16 = torch.bfloat16
    return [
        Case("fp8 1x128 to bf16", lambda x: quantize_dequantize(x, FP8, ROW, dtype=bf16), 4, 0.85),
        Case("fp4 1x128 to bf16", lambda x: quantize_dequantize(x, FP4, ROW, dtype=bf16), 4, 0.85),
        Case("fp8 1x128 payload", lambda x: _payload(x, FP8, ROW), 3 + scale, 0.85),
        Case("fp4 1x128 payload", lambda x: _payload(x, FP4, ROW), 3 + scale, 0.85),
        Case(
            "fp4 128x1 to bf16", lambda x: quantize_dequantize(x, FP4, TOKENS, dtype=bf16), 4, 0.85
        ),
        Case(
            "fp8 128x1 payload, transposed",
            lambda x: quantize_payload(x, FP8, TOKENS, transpose=True),
            3 + scale,
            0.8,
        ),
        Case("fp8 128x128 payload", lambda x: quantize_payload(x, FP8, SQUARE), 3, 0.85),
        Case(
            "fp4 128x128 to bf16",
            lambda x: quantize_dequantize(x, FP4, SQUARE, dtype=bf16),
            4,
            0.85,
        ),
        Case(
            "mxfp4 1x32 to bf16",
            lambda x: quantize_dequantize(x, FORMATS["mxfp4"], (1, 32), dtype=bf16),
            4,
            0.85,
        ),
        Case("fp8 both payloads", lambda x: _both(x, FP8), 4 + 2 * scale, 0.8),
        Case(
            "fp4 both payloads, stochastic", lambda x: _both(x, FP4, STREAM, OTHER), 4 + 2 * scale
        ),
        Case(
            "fp4 both to bf16, stochastic",
            lambda x: quantize_dequantize_both(
                x, (FP4, FP4), (ROW, TOKENS), streams=(STREAM, OTHER), dtype=bf16
            ),
            6,
        ),
        Case(
            "fp4 1x128 to bf16, stochastic",
            lambda x: quantize_dequantize(x, FP4, ROW, stream=STREAM, dtype=bf16),
            4,
        ),
        Case(
            "fp4 1x128 payload, stochastic",
            lambda x: _payload(x, FP4, ROW, STREAM),
            3 + scale,
        ),
        Case("error norms fp8+fp4 1x128", lambda x: error_norms(x, norms, rowwise=True), 2, 0.8),
        Case("moments", moments, 2, 0.8),
    ]


def torchao_cases(device: torch.device) -> list[Case]:
    """The same work by torchao's FP8 kernels, where they can run."""
    if device.type != "cuda":
        return []
    try:
        kernels = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    except Exception:  # not installed, or made for another torch
        return []
    return [
        Case("torchao fp8 1x128", kernels.triton_fp8_blockwise_act_quant_lhs, 3 + 4 / 128),
        Case(
            "torchao fp8 128x1, transposed",
            kernels.triton_fp8_blockwise_act_quant_transposed_lhs,
            3 + 4 / 128,
        ),
        Case("torchao fp8 128x128", kernels.triton_fp8_blockwise_weight_quant_rhs, 3),
    ]


def check_bits(device: torch.device) -> list[str]:
    """Names of the cases whose output on `device` differs from the CPU's, on a ragged matrix."""
    torch.manual_seed(0)
    x = torch.randn(517, 1037).mul_(torch.exp2(torch.randint(-20, 20, (517, 1)))).bfloat16()
    x[3, 5], x[100, 1000] = float("nan"), float("inf")
    exact = [case for case in cases() if "norms" not in case.name and case.name != "moments"]
    return [name for name, same in ((c.name, _agrees(c, x, device)) for c in exact) if not same]


def _agrees(case: Case, x: torch.Tensor, device: torch.device) -> bool:
    """Whether a case's output on a device is the CPU's; a failure is no agreement, and shown."""
    try:
        return same(case.work(x.to(device)), case.work(x))
    except Exception as error:  # the other cases go on
        print(f"{case.name} on {device}: {said(error)}", file=sys.stderr)
        return False


def _payload(x: torch.Tensor, fmt: Any, block: Any, stream: Any = None) -> Any:
    return quantize_payload(x, fmt, block, stream=stream, scales_col_major=True)


def _both(x: torch.Tensor, fmt: Any, *streams: Any) -> Any:
    return quantize_payload_both(x, (fmt, fmt), (ROW, TOKENS), streams=streams or (None, None))


def same(ours: Any, wanted: Any) -> bool:
    """Bits alike, all NaN alike, tensor by tensor."""
    if isinstance(ours, tuple):
        return all(same(a, b) for a, b in zip(ours, wanted, strict=True))
    if not isinstance(ours, torch.Tensor):
        return same((ours.codes, ours.scales), (wanted.codes, wanted.scales))
    return torch.equal(ours.cpu().float().nan_to_num(7e37), wanted.float().nan_to_num(7e37))
