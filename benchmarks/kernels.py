"""How close the quantization kernels come to the device's copy bandwidth.

    python -m benchmarks.kernels [--json FILE]               on a GPU: kernels
    python -m benchmarks.kernels --cpu                       anywhere: the reference path
    python -m benchmarks.kernels --static                    anywhere: what the kernels compile to

Every figure is a ratio measured in one run: bytes a kernel must move over its time, against bytes
over time of a plain copy of the same tensor (`copy_`, one read and one write). Tensors are larger
than the caches, inputs rotate, data is random; times are medians of CUDA events, taken while the
host runs ahead of the GPU (`timing`). Before anything is timed, each kernel's output is compared
with the CPU reference, bit for bit. A case that fails is named and left out.

Goals (ratios): 1. quantize >= 0.85 of the copy's bandwidth; 2. both directions from one read
>= 0.80, and >= 1.3 times faster than two kernels; 3. stochastic over nearest <= 1.4 in time;
4. error norms >= 0.80 of the copy's bandwidth, counting the bytes read. Where torchao is
installed, its FP8 kernels run beside ours on the same tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_cases import (
    Work,
    cases,
    check_bits,
    torchao_cases,
)
from benchmarks.machine import write_result
from benchmarks.timing import said, sleep


@dataclass(frozen=True)
class Result:
    """A timed case.

    Attributes:
        name: the case's.
        milliseconds: median time.
        gigabytes_per_s: bytes that must be moved over that time.
        copy_fraction: that over the copy's bandwidth in the same run.
        goal: least copy_fraction, or None.
    """

    name: str
    milliseconds: float
    gigabytes_per_s: float
    copy_fraction: float
    goal: float | None


@dataclass(frozen=True)
class Ratio:
    """Two cases against each other.

    Attributes:
        name: what is compared.
        value: the ratio of times.
        least: goal from below, or None.
        most: goal from above, or None.
    """

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)


def ratios(results: dict[str, Result]) -> list[Ratio]:
    """The comparisons that have goals of their own, of what was timed."""

    def time_of(*names: str) -> float | None:
        if any(name not in results for name in names):
            return None
        return sum(results[name].milliseconds for name in names)

    wanted = (
        ("two kernels / both directions", ("fp8 1x128", "fp8 128x1"), "fp8 both directions", 1.3),
        ("stochastic / nearest", ("fp4 1x128, stochastic",), "fp4 1x128", None),
    )
    found = []
    for name, above, below, least in wanted:
        over, under = time_of(*above), time_of(below)
        if over is not None and under is not None:
            found.append(Ratio(name, over / under, least, 1.4 if least is None else None))
    return found


def goals(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return what was wanted and what was found."""
    bandwidths = [
        {
            "name": f"{result.name}, of the copy's bandwidth",
            "value": result.copy_fraction,
            "least": result.goal,
            "most": None,
            "met": result.copy_fraction >= result.goal,
        }
        for result in results
        if result.goal is not None
    ]
    compared = ratios({result.name: result for result in results})
    return bandwidths + [{**asdict(ratio), "met": ratio.met} for ratio in compared]


def time_on_gpu(work: Work, inputs: list[torch.Tensor], repeats: int) -> float:
    """Median seconds of `work` over rotating inputs, by CUDA events."""
    make_event: Any = torch.cuda.Event
    for x in inputs:
        work(x)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work(inputs[0])
    host_s = time.perf_counter() - begin  # to enqueue it
    torch.cuda.synchronize()
    spans = []
    for i in range(repeats):
        if i % HELD_RUNS == 0:
            sleep(1.5 * HELD_RUNS * host_s)
        start, stop = make_event(enable_timing=True), make_event(enable_timing=True)
        start.record()
        work(inputs[i % len(inputs)])
        stop.record()
        spans.append((start, stop))
    torch.cuda.synchronize()
    milliseconds: list[float] = [start.elapsed_time(stop) for start, stop in spans]
    return statistics.median(milliseconds) / 1e3


HELD_RUNS = 10
"""Runs that are enqueued while the GPU sleeps."""


def time_on_cpu(work: Work, inputs: list[torch.Tensor], repeats: int) -> float:
    """Median seconds of `work` over rotating inputs, by the clock."""
    work(inputs[0])
    spans = []
    for i in range(repeats):
        start = time.perf_counter()
        work(inputs[i % len(inputs)])
        spans.append(time.perf_counter() - start)
    return statistics.median(spans)


def measure(
    inputs: list[torch.Tensor],
    repeats: int,
    timer: Callable[[Work, list[torch.Tensor], int], float],
    failures: dict[str, str],
) -> tuple[float, list[Result]]:
    """Return the copy's bytes per second, and every case beside it.

    Args:
        inputs: what cases run on in turn.
        repeats: timed runs of each.
        timer: measures one.
        failures: gets the reasons of what did not run.
    """
    target = torch.empty_like(inputs[0])
    numel = inputs[0].numel()
    copy_rate = 4 * numel / timer(target.copy_, inputs, repeats)
    results = []
    for case in cases() + torchao_cases(inputs[0].device):
        try:
            seconds = timer(case.work, inputs, repeats)
        except Exception as error:  # the other cases go on
            failures[case.name] = said(error)
            continue
        rate = case.bytes_per_element * numel / seconds
        results.append(Result(case.name, seconds * 1e3, rate / 1e9, rate / copy_rate, case.goal))
    return copy_rate, results


def main(argv: Sequence[str] | None = None) -> int:
    """Run on the GPU, or on the CPU if asked; 1 if bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="time the reference path, small")
    parser.add_argument("--static", action="store_true", help="count instructions; no GPU needed")
    parser.add_argument("--rows", type=int, help="rows of the matrix [16384; 2048 on the CPU]")
    parser.add_argument("--cols", type=int, help="columns [8192; 1024 on the CPU]")
    parser.add_argument("--repeats", type=int, help="timed runs a case [50; 3 on the CPU]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(argv)
    console = Console()
    if options.static:
        return _static(console, options.json)
    if not torch.cuda.is_available() and not options.cpu:
        console.print("No CUDA device here, so no kernel is timed; --cpu times the reference path.")
        return 0
    device = torch.device("cpu" if options.cpu else "cuda")
    small = options.cpu
    shape = (options.rows or (2048 if small else 16384), options.cols or (1024 if small else 8192))
    repeats = options.repeats or (3 if small else 50)
    differing = [] if small else check_bits(device)
    inputs = [torch.randn(shape, device=device).bfloat16() for _ in range(1 if small else 3)]
    failures: dict[str, str] = {}
    timer = time_on_cpu if small else time_on_gpu
    copy_rate, results = measure(inputs, repeats, timer, failures)
    report = {
        "device": torch.cuda.get_device_name(device) if not small else "the reference on the CPU",
        "shape": list(shape),
        "copy_gigabytes_per_s": copy_rate / 1e9,
        "bits_differ": differing,
        "failures": failures,
        "results": [asdict(result) for result in results],
        "ratios": [
            {**asdict(r), "met": r.met} for r in ratios({result.name: result for result in results})
        ],
    }
    report["goals"] = [] if small else goals(results)
    if options.json:
        write_result(options.json, report)
    _show(console, report, goals=not small)
    ours = [name for name in failures if not name.startswith("torchao")]
    return 1 if differing or ours else 0


def _static(console: Console, file: Path | None) -> int:
    """Print instructions per element, registers and spills; 1 if registers spill."""
    from benchmarks import static

    rows = [row for arch in (90, 100) for row in static.table(arch)]
    shown = Table("kernel", "GPU", "instructions/element", "goal", "registers", "spilled", "warps")
    for row in rows:
        goal = row["goal"]
        style = "" if goal is None else "green" if row["instructions"] <= goal else "red"
        shown.add_row(
            row["name"],
            f"sm_{row['arch']}",
            f"{row['instructions']:.1f}",
            "" if goal is None else f"<= {goal}",
            *(str(row[key]) for key in ("registers", "spilled_bytes", "warps")),
            style=style,
        )
    console.print(shown)
    if file:
        write_result(file, {"compiled": rows})
    return int(any(row["spilled_bytes"] for row in rows))


def _show(console: Console, report: dict[str, Any], *, goals: bool) -> None:
    rows, cols = report["shape"]
    title = f"{report['device']}, {rows}x{cols} bf16"
    table = Table(title=f"{title}, copy {report['copy_gigabytes_per_s']:.0f} GB/s")
    for column in ("kernel", "ms", "ns/element", "GB/s", "of copy", "goal"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for result in report["results"]:
        goal = result["goal"] if goals else None
        color = "" if goal is None else "green" if result["copy_fraction"] >= goal else "red"
        table.add_row(
            result["name"],
            f"{result['milliseconds']:.3f}",
            f"{result['milliseconds'] * 1e6 / (rows * cols):.3f}",
            f"{result['gigabytes_per_s']:.0f}",
            f"{result['copy_fraction']:.3f}",
            "" if goal is None else f">= {goal}",
            style=color,
        )
    for ratio in report["ratios"]:
        bound = f">= {ratio['least']}" if ratio["least"] else f"<= {ratio['most']}"
        color = "" if not goals else "green" if ratio["met"] else "red"
        table.add_row(ratio["name"], "", "", "", f"{ratio['value']:.3f}", bound, style=color)
    console.print(table)
    for name, why in report["failures"].items():
        console.print(f"{name} failed: {why}", markup=False, style="red")
    if report["bits_differ"]:
        console.print("[red]differ from the CPU reference:[/] " + ", ".join(report["bits_differ"]))


if __name__ == "__main__":
    raise SystemExit(main())
