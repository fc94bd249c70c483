"""One linear's forward and backward under every way to run it, against BF16.

    python -m benchmarks.linear [--cpu] [--rounds N] [--json FILE]

Ways: BF16 (torch's own GEMMs), fp8 and fp4 natively (FP8 tensor cores; on Hopper), fp8 and fp4
simulated. Everything is in the time: quantizing X, G and W (which a training step does once and
not once a microbatch), scale layouts, the three GEMMs, the cast of dW. `parts` are the native
way's quantization and GEMMs by themselves. Before anything is timed, the three native GEMMs are
compared with their emulation (`native_support`).

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
from rich.console import Console
from rich.table import Table

from benchmarks.machine import has_gpu, write_result
from benchmarks.timing import seconds_by_turns
from megatron_snip.linears import native
from megatron_snip.linears.autograd import LinearCall, QuantizedLinear
from megatron_snip.linears.native_support import native_obstacle, worst_error
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


def ways(shape: Shape, device: torch.device, with_native: bool) -> dict[str, Run]:
    """Return name -> one forward and backward."""
    m, k, n = shape
    x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
    w = (torch.randn(n, k, device=device) / k**0.5).bfloat16().requires_grad_()
    g = torch.randn(m, n, device=device).bfloat16()

    def bf16() -> None:
        (x @ w.t()).backward(g)
        x.grad = w.grad = None

    def quantized(name: str, runs: frozenset[Gemm]) -> Run:
        call = LinearCall(Option.uniform(name), lambda: STREAM, False, False, False, None, runs)

        def run() -> None:
            apply: Any = QuantizedLinear.apply
            apply(x, w, None, call).backward(g)
            x.grad = w.grad = None

        return run

    found: dict[str, Run] = {"bf16": bf16}
    if with_native:
        found |= {f"{name} native": quantized(name, frozenset(Gemm)) for name in ("fp8", "fp4")}
    return found | {f"{name} simulate": quantized(name, frozenset()) for name in ("fp8", "fp4")}


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
        "bf16 wgrad GEMM": lambda: g.t() @ x,
    }


def measure(shape: Shape, device: torch.device, with_native: bool, rounds: int) -> dict[str, Any]:
    """Return times and ratios of one shape."""
    gpu = device.type == "cuda"
    times = seconds_by_turns(ways(shape, device, with_native), rounds, gpu)
    result: dict[str, Any] = {
        "shape": list(shape),
        "seconds": times,
        "speedup_over_bf16": {name: times["bf16"] / t for name, t in times.items()},
        "bf16_tflops": 6 * shape[0] * shape[1] * shape[2] / times["bf16"] / 1e12,
    }
    if with_native:
        pieces = seconds_by_turns(parts(shape, device), rounds, gpu)
        result["parts_seconds"] = pieces
        result["quantize_share_of_fp8"] = pieces["quantize X, G, W"] / times["fp8 native"]
        result["fp4_over_fp8_native"] = times["fp4 native"] / times["fp8 native"]
        result["wgrad_speedup"] = pieces["bf16 wgrad GEMM"] / pieces["wgrad GEMM"]
    return result


def goals(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was wanted and what was found; goals of shapes that were not run are left out."""
    least = {(4096, 4096, 4096): 1.10, (16384, 4096, 4096): 1.20, (8192, 8192, 8192): 1.30}
    rows: list[dict[str, Any]] = []

    def add(name: str, value: float, low: float | None, high: float | None) -> None:
        met = (low is None or value >= low) and (high is None or value <= high)
        rows.append({"name": name, "value": value, "least": low, "most": high, "met": met})

    for result in results:
        shape = tuple(result["shape"])
        if shape not in least:
            continue
        text, speedup = said(shape), result["speedup_over_bf16"]
        if "fp8 native" in speedup:
            add(f"fp8 native over bf16, {text}", speedup["fp8 native"], least[shape], None)
            add(f"fp4 / fp8 native time, {text}", result["fp4_over_fp8_native"], None, 1.10)
        if shape == (8192, 8192, 8192):
            add(f"simulate / bf16 time, {text}", 1 / speedup["fp8 simulate"], None, 1.20)
            if "quantize_share_of_fp8" in result:
                share = result["quantize_share_of_fp8"]
                add(f"quantize share of fp8 native, {text}", share, None, 0.12)
    return rows


def said(shape: Sequence[int]) -> str:
    """Return a shape as people write it."""
    return "x".join(map(str, shape))


def run(device: torch.device, shapes: Sequence[Shape], rounds: int) -> dict[str, Any]:
    """Return the whole result."""
    gpu = device.type == "cuda"
    obstacle = native_obstacle(torch.cuda.get_device_capability() if gpu else None)
    results = [measure(shape, device, not obstacle, rounds) for shape in shapes]
    report: dict[str, Any] = {
        "native_obstacle": obstacle,
        "results": results,
        "goals": goals(results),
    }
    if not obstacle:
        error, where = worst_error(device)
        report["native_error"] = {
            "over_sum_of_products": error,
            "gemm": where,
            "tolerance": native.DEVICE_TOLERANCE,
        }
    return report


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table a shape."""
    if report["native_obstacle"]:
        console.print(f"nothing native: {report['native_obstacle']}", markup=False)
    for result in report["results"]:
        title = f"M x K x N = {said(result['shape'])}, bf16 {result['bf16_tflops']:.3g} TFLOPS"
        table = Table(title=title)
        for column in ("forward + backward", "ms", "speed over bf16"):
            table.add_column(column, justify="left" if column[0] == "f" else "right")
        for name, seconds in result["seconds"].items():
            speedup = result["speedup_over_bf16"][name]
            table.add_row(name, f"{seconds * 1e3:.3f}", f"{speedup:.2f}")
        for name, seconds in result.get("parts_seconds", {}).items():
            table.add_row(f"  {name}", f"{seconds * 1e3:.3f}", "")
        console.print(table)
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
    report = run(device, shapes, args.rounds or (5 if on_cpu else 20))
    show(report, Console())
    if args.json:
        write_result(args.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
