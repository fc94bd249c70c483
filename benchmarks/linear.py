"""One linear's forward and backward, simulated, against BF16.

    python -m benchmarks.linear [--cpu] [--rounds N] [--json FILE]

Cases: BF16 (torch's own GEMMs), fp8 and fp4 simulated, and fp8 with W from the cache, as from a
step's second microbatch on. Everything is in the time: quantizing X, G and W, the three GEMMs, the
cast of dW. `saved_bytes` is what is saved for the backward beside W. On a GPU only its own work is
timed (`timing`); `host_seconds` is what Python takes to enqueue it, which bounds small linears.

Goal: simulated <= 1.20 of BF16's time at 8192^3.
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
from megatron_snip.linears.quantized_linear import LinearCall, WeightCache, quantized_linear
from megatron_snip.options import Option
from megatron_snip.patches import cpu
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey

Shape = tuple[int, int, int]
"""M tokens, K in_features, N out_features."""

GPU_SHAPES: tuple[Shape, ...] = (
    (8192, 4096, 4096),
    (8192, 4096, 12288),
    (8192, 4096, 22016),
    (8192, 11008, 4096),
    (8192, 8192, 8192),
)
"""The four linears of a Llama-7B layer, and the shape of the goal."""

CPU_SHAPES: tuple[Shape, ...] = ((1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256))
STREAM = StochasticStream(StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0))
Run = Callable[[], Any]
Keeper = Callable[[dict[str, Any]], None]


def forwards(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return name -> one forward of X [M, K] and W [N, K]."""

    def simulated(name: str, cache: WeightCache | None = None) -> Callable[[], torch.Tensor]:
        call = LinearCall(Option.uniform(name), lambda: STREAM, cache=cache)
        return lambda: quantized_linear(x, w, None, call)

    return {
        "bf16": lambda: x @ w.t(),
        "fp8 simulate": simulated("fp8"),
        "fp8 simulate, W cached": simulated("fp8", {}),
        "fp4 simulate": simulated("fp4"),
    }


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


def measure(shape: Shape, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return times and ratios of one shape; what failed is named beside them."""
    m, k, n = shape
    gpu = device.type == "cuda"
    x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
    w = (torch.randn(n, k, device=device) / k**0.5).bfloat16().requires_grad_()
    g = torch.randn(m, n, device=device).bfloat16()
    ways = forwards(x, w)
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
    return result


def _step(
    forward: Callable[[], torch.Tensor], x: torch.Tensor, w: torch.Tensor, g: torch.Tensor
) -> Run:
    def run() -> None:
        backward: Any = forward().backward
        backward(g)
        x.grad = w.grad = None

    return run


def goals(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was wanted and what was found at 8192^3, if that was run."""
    rows = []
    for result in results:
        speedup = result.get("speedup_over_bf16", {})
        if result["shape"] == [8192] * 3 and "fp8 simulate" in speedup:
            ratio = 1 / speedup["fp8 simulate"]
            name = f"simulate / bf16 time, {said(result['shape'])}"
            rows.append({"name": name, "value": ratio, "most": 1.20, "met": ratio <= 1.20})
    return rows


def said(shape: Sequence[int]) -> str:
    """Return a shape as a table shows it."""
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
    report: dict[str, Any] = {"results": [], "goals": []}
    for shape in shapes:
        report["results"].append(measure(shape, device, rounds))
        report["goals"] = goals(report["results"])
        keep(report)
    return report


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table a shape."""
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
        console.print(table)
        for name, why in result["failures"].items():
            console.print(f"{name} failed: {why}", markup=False, style="red")
    for goal in report["goals"]:
        mark = "[green]met[/]" if goal["met"] else "[red]missed[/]"
        console.print(f"{goal['name']}: {goal['value']:.3f} (<= {goal['most']}) {mark}")


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
