"""Time a linear's three GEMMs in every format, quantization included, as `simulate` runs them.

A GEMM is timed by itself, so what training does once for two of them (reading G, quantizing W) is
counted in each.

torch is imported when there is something to time, so that --help need not wait for it.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.options import Option
from megatron_snip.types import Gemm

if TYPE_CHECKING:
    import torch

MAX_RUNS = 200
"""Most times a GEMM is run; fast ones stop here, slow ones at --seconds."""


@dataclass(frozen=True)
class Shape:
    """A linear to measure: the glob it stands for, and [out_features, in_features]."""

    names: str
    out_features: int
    in_features: int


def measure(
    shape: Shape, tokens: int, device: torch.device, budget_s: float, formats: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the seconds of every format that runs here, by GEMM; say which ones do not.

    Args:
        shape: of the linear.
        tokens: rows of its input.
        device: where to run.
        budget_s: seconds to spend on each GEMM and format.
        formats: names.

    Raises:
        UsageError: if none of the formats runs here.
        RuntimeError: if memory is short.
    """
    bench = _Bench(shape, tokens, device, budget_s)
    seconds: dict[str, dict[str, float]] = {}
    for name in formats:
        option = Option.uniform(name)
        try:
            seconds[name] = {g.value: bench.seconds(bench.gemm(g, option)) for g in Gemm}
        except (UnsupportedError, NotImplementedError) as error:
            print(f"megatron-snip calibrate: {name} does not run here: {error}", file=sys.stderr)
    if not seconds:
        raise UsageError("none of the formats runs on this machine")
    return seconds


class _Bench:
    """One shape's operands, and its GEMMs as training runs them."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device, budget_s: float) -> None:
        import torch

        from megatron_snip.quantizers import StochasticStream, StreamKey

        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, cols: int) -> torch.Tensor:
            values = torch.randn(rows, cols, generator=generator, device=device)
            return values.to(torch.bfloat16)

        self.x = random(tokens, shape.in_features)  # [M, K]
        self.w = random(shape.out_features, shape.in_features)  # [N, K]
        self.g = random(tokens, shape.out_features)  # [M, N]
        self.stream = StochasticStream(StreamKey(seed=0, linear=shape.names, step=0, microbatch=0))
        self.device = device
        self.budget_s = budget_s

    def gemm(self, gemm: Gemm, option: Option) -> Callable[[], torch.Tensor]:
        """Return a call that runs one GEMM, quantization included."""
        from megatron_snip.linears import simulated_gemm as run

        x, w, g, cols = self.x, self.w, self.g, self.x.shape[1]
        if gemm is Gemm.FPROP:
            return lambda: run.fprop(x, w, option)

        def backward() -> torch.Tensor:
            is_dgrad = gemm is Gemm.DGRAD
            both = run.quantize_grad_output(
                g, option, self.stream, cols, dgrad=is_dgrad, wgrad=not is_dgrad
            )
            g_q = both[0] if is_dgrad else both[1]
            assert g_q is not None
            return run.dgrad(g_q, w, option, g.dtype) if is_dgrad else run.wgrad(g_q, x, option)

        return backward

    def seconds(self, call: Callable[[], torch.Tensor]) -> float:
        """Return the median time of a call; the first runs, which compile and warm up, excluded."""
        with self._as_in_training():
            self._timed(call)
            first = self._timed(call)
            runs = max(3, min(MAX_RUNS, int(self.budget_s / max(first, 1e-9))))
            return statistics.median(self._timed(call) for _ in range(runs))

    def _as_in_training(self) -> contextlib.AbstractContextManager[object]:
        """Return what training on the CPU runs within: it computes products of BF16 in FP32."""
        if self.device.type == "cuda":
            return contextlib.nullcontext()
        from megatron_snip.patches.cpu.tensors import CudaOnCpu

        return CudaOnCpu()

    def _timed(self, call: Callable[[], torch.Tensor]) -> float:
        import torch

        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start
