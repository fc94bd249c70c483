"""One linear's forward and backward under every way to run it, against BF16.

    python -m benchmarks.linear [--cpu] [--rounds N] [--json FILE]

Ways: BF16 (torch's own GEMMs), fp8 and fp4 natively (FP8 tensor cores; on Hopper), fp8 and fp4
simulated. Everything is in the time: quantizing X, G and W, scale layouts, the three GEMMs, the
cast of dW; with `W kept` all but quantizing W, as from a step's second microbatch on. `parts` are
the native way's quantization and GEMMs by themselves, `saved_bytes` what waits for the backward
beside W. Before anything is timed, the native GEMMs are compared with their emulation
(`native_support`). On a GPU only its own work is timed (`timing`); `host_seconds` beside it is what
Python takes to enqueue it, which bounds small linears in a model that does not run ahead.

Goals (times over BF16's, rows 5 to 10 of the project's table): speed-up of native fp8 >= 1.20 at
16384x4096x4096, >= 1.30 at 8192^3, >= 1.10 at 4096^3; quantization <= 12 % of native fp8 at
8192^3; native fp4 <= 1.10 of native fp8; simulated <= 1.20 of BF16 at 8192^3.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on the CPU: one core, whatever else it does

import torch
from megatron_snip.linears.gemms import unkept
from megatron_snip.linears.kept_weights import KeptWeights
from megatron_snip.linears.native_support import native_obstacle, worst_error
from rich.console import Console
from rich.table import Table

from benchmarks.machine import has_gpu, write_result
from benchmarks.timing import said as said_error
from benchmarks.timing import seconds_by_turns
from megatron_snip.linears import native
from megatron_snip.linears.autograd import Keep, LinearCall, QuantizedLinear
from megatron_snip.options import Option
from megatron_snip.patches import cpu
from megatron_snip.quantizers import StochasticStream, StreamKey
from megatron_snip.types import Gemm

Shape = tuple[int, int, int]
"""M tokens, K in_features, N out_features."""

GPU_SHAPES: tuple[Shape, ...] = ((4096, 4096, 4096), (16384, 4096, 4096), (8192, 8192, 8192))
CPU_SHAPES: tuple[Shape, ...] = ((1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256))
STREAM = StochasticStream(StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0))
Run = Callable[[], Any]
Keeper = Callable[[dict[str, Any]], None]


def forwards(
    x: torch.Tensor, w: torch.Tensor, with_native: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return name -> one forward of X [M, K] and W [N, K]."""

    def quantized(
        name: str, runs: frozenset[Gemm], keep: Keep = unkept
    ) -> Callable[[], torch.Tensor]:
        option = Option.uniform(name)
        call = LinearCall(option, lambda: STREAM, False, False, False, None, runs, keep)
        apply: Any = QuantizedLinear.apply
        return lambda: apply(x, w, None, call)

    found = {"bf16": lambda: x @ w.t()}
    if with_native:
        every, kept = frozenset(Gemm), KeptWeights()
        kept.open()
        keep: Keep = lambda form, make: kept.get("benchmark", form, w, make)  # noqa: E731
        found |= {f"{name} native": quantized(name, every) for name in ("fp8", "fp4")}
        found["fp8 native, W kept"] = quantized("fp8", every, keep)
    return found | {f"{name} simulate": quantized(name, frozenset()) for name in ("fp8", "fp4")}


def saved_bytes(forward: Callable[[], torch.Tensor], w: torch.Tensor) -> int:
    """Return the bytes that a forward keeps for its backward, beside the weight."""
    held: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        held[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        forward()
    held.pop(w.untyped_storage().data_ptr(), None)
    return sum(held.values())


def parts(shape: Shape, device: torch.device) -> dict[str, Run]:
    """Return name -> a part of the native fp8 linear, and BF16's wgrad beside native's."""
    m, k, n = shape
    option = Option.uniform("fp8")
    x, g = (torch.randn(m, size, device=device).bfloat16() for size in (k, n))
    w = torch.randn(n, k, device=device).bfloat16()

    def weights() -> list[Any]:
        return [
            native.weight_operand(w, option, gemm, lambda _, make: make())
            for gemm in (Gemm.FPROP, Gemm.DGRAD)
        ]

    def quantize() -> tuple[Any, ...]:
        both = native.input_operands(x, option, True, True)
        return *both, *native.grad_operands(g, option, STREAM, True, True), *weights()

    x_row, x_tokens, g_row, g_tokens, forward, backward = quantize()
    return {
        "quantize X, G, W": quantize,
        "quantize W": weights,
        "fprop GEMM": lambda: native.fprop(x_row, forward, torch.bfloat16),
        "dgrad GEMM": lambda: native.dgrad(g_row, backward, torch.bfloat16),
        "wgrad GEMM": lambda: native.wgrad(g_tokens, x_tokens),
        "bf16 fprop GEMM": lambda: x @ w.t(),
        "bf16 wgrad GEMM": lambda: g.t() @ x,
    }


def measure(shape: Shape, device: torch.device, with_native: bool, rounds: int) -> dict[str, Any]:
    """Return times and ratios of one shape; what failed is named beside them."""
    m, k, n = shape
    gpu = device.type == "cuda"
    x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
    w = (torch.randn(n, k, device=device) / k**0.5).bfloat16().requires_grad_()
    g = torch.randn(m, n, device=device).bfloat16()
    ways = forwards(x, w, with_native)
    times = seconds_by_turns(
        {name: _step(forward, x, w, g) for name, forward in ways.items()}, rounds, gpu, ahead=True
    )
    result: dict[str, Any] = {
        "shape": list(shape),
        "seconds": times.seconds,
        "host_seconds": times.host_seconds,
        "saved_bytes": {name: saved_bytes(ways[name], w) for name in times.seconds},
        "failures": times.failed,
    }
    if "bf16" in times.seconds:
        bf16 = times.seconds["bf16"]
        result["speedup_over_bf16"] = {name: bf16 / t for name, t in times.seconds.items()}
        result["bf16_tflops"] = 6 * m * k * n / bf16 / 1e12
    if with_native:
        _measure_parts(result, shape, device, rounds)
    return result


def _step(
    forward: Callable[[], torch.Tensor], x: torch.Tensor, w: torch.Tensor, g: torch.Tensor
) -> Run:
    def run() -> None:
        backward: Any = forward().backward
        backward(g)
        x.grad = w.grad = None

    return run


def _measure_parts(result: dict[str, Any], shape: Shape, device: torch.device, rounds: int) -> None:
    """Add the native way's parts to what was measured of a shape."""
    try:
        pieces = parts(shape, device)
    except Exception as error:  # the whole is measured already
        result["failures"]["parts"] = said_error(error)
        return
    times = seconds_by_turns(pieces, rounds, device.type == "cuda", ahead=True)
    result["parts_seconds"] = times.seconds
    result["failures"] |= times.failed
    result["wgrad_speedup"] = _ratio(times.seconds, "bf16 wgrad GEMM", "wgrad GEMM")
    result["fprop_speedup"] = _ratio(times.seconds, "bf16 fprop GEMM", "fprop GEMM")
    whole = result["seconds"] | times.seconds
    result["quantize_share_of_fp8"] = _ratio(whole, "quantize X, G, W", "fp8 native")
    result["fp4_over_fp8_native"] = _ratio(whole, "fp4 native", "fp8 native")


def _ratio(seconds: dict[str, float], above: str, below: str) -> float | None:
    return seconds[above] / seconds[below] if above in seconds and below in seconds else None


def goals(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was wanted and what was found; goals of shapes that were not run are left out."""
    least = {(4096, 4096, 4096): 1.10, (16384, 4096, 4096): 1.20, (8192, 8192, 8192): 1.30}
    rows: list[dict[str, Any]] = []

    def add(name: str, value: float | None, low: float | None, high: float | None) -> None:
        if value is None:
            return
        met = (low is None or value >= low) and (high is None or value <= high)
        rows.append({"name": name, "value": value, "least": low, "most": high, "met": met})

    for result in results:
        shape = tuple(result["shape"])
        if shape not in least:
            continue
        text, speedup = said(shape), result.get("speedup_over_bf16", {})
        add(f"fp8 native over bf16, {text}", speedup.get("fp8 native"), least[shape], None)
        ratio = result.get("fp4_over_fp8_native")
        add(f"fp4 / fp8 native time, {text}", ratio, None, 1.10)
        if shape == (8192, 8192, 8192):
            slower = 1 / speedup["fp8 simulate"] if "fp8 simulate" in speedup else None
            add(f"simulate / bf16 time, {text}", slower, None, 1.20)
            share = result.get("quantize_share_of_fp8")
            add(f"quantize share of fp8 native, {text}", share, None, 0.12)
    return rows


def said(shape: Sequence[int]) -> str:
    """Return a shape as people write it."""
    return "x".join(map(str, shape))


def run(
    device: torch.device, shapes: Sequence[Shape], rounds: int, keep: Keeper = lambda _: None
) -> dict[str, Any]:
    """Return the whole result.

    Args:
        device: where.
        shapes: what to measure.
        rounds: timed runs of each way.
        keep: called with what there is so far, after every shape.
    """
    gpu = device.type == "cuda"
    obstacle = native_obstacle(torch.cuda.get_device_capability() if gpu else None)
    report: dict[str, Any] = {"native_obstacle": obstacle, "results": [], "goals": []}
    if not obstacle:
        error, where = worst_error(device)
        tolerance = native.DEVICE_TOLERANCE
        report["native_error"] = {
            "over_sum_of_products": error,
            "gemm": where,
            "tolerance": tolerance,
        }
    for shape in shapes:
        report["results"].append(measure(shape, device, not obstacle, rounds))
        report["goals"] = goals(report["results"])
        keep(report)
    return report


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table a shape."""
    if report["native_obstacle"]:
        console.print(f"nothing native: {report['native_obstacle']}", markup=False)
    for result in report["results"]:
        title = f"M x K x N = {said(result['shape'])}"
        if "bf16_tflops" in result:
            title += f", bf16 {result['bf16_tflops']:.3g} TFLOPS"
        table = Table(title=title)
        for column in ("forward + backward", "ms", "speed over bf16", "host, ms", "saved, MB"):
            table.add_column(column, justify="left" if column[0] == "f" else "right")
        for name, seconds in result["seconds"].items():
            speedup = result.get("speedup_over_bf16", {}).get(name)
            host = result["host_seconds"].get(name)
            table.add_row(
                name,
                f"{seconds * 1e3:.3f}",
                "" if speedup is None else f"{speedup:.2f}",
                "" if host is None else f"{host * 1e3:.3f}",
                f"{result['saved_bytes'][name] / 1e6:.1f}",
            )
        for name, seconds in result.get("parts_seconds", {}).items():
            table.add_row(f"  {name}", f"{seconds * 1e3:.3f}", "")
        console.print(table)
        for name, why in result["failures"].items():
            console.print(f"{name} failed: {why}", markup=False, style="red")
    for goal in report["goals"]:
        bound = f">= {goal['least']}" if goal["least"] else f"<= {goal['most']}"
        mark = "[green]met[/]" if goal["met"] else "[red]missed[/]"
        console.print(f"{goal['name']}: {goal['value']:.3f} ({bound}) {mark}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--rounds", type=int, help="timed runs of each way [20; 5 on the CPU]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    on_cpu = args.cpu or not has_gpu()
    if on_cpu:
        torch.set_num_threads(1)
        cpu.install()  # its BF16 GEMMs multiply in FP32, as those of a run with --cpu do
    device = torch.device("cpu" if on_cpu else "cuda")
    shapes = CPU_SHAPES if on_cpu else GPU_SHAPES

    def keep(report: dict[str, Any]) -> None:
        if args.json:
            write_result(args.json, report)

    report = run(device, shapes, args.rounds or (5 if on_cpu else 20), keep)
    show(report, Console())
    return 1 if any(result["failures"] for result in report["results"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
