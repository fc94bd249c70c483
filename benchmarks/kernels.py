"""How close the quantization kernels come to the device's copy bandwidth.

    python -m benchmarks.kernels [--json FILE]               on a GPU: time
    python -m benchmarks.kernels --static [--json FILE]      anywhere: what is compiled and started

Every figure is a ratio measured in one run: bytes a kernel must move over its time, against bytes
over time of a plain copy of the same tensor (`copy_`, one read and one write). Tensors are larger
than the caches, inputs rotate, data is random; times are medians of CUDA events, taken while the
host runs ahead of the GPU (`timing`). Before anything is timed, each kernel's output is compared
with the CPU reference, bit for bit. A case that fails is named and left out.

Goals (ratios): 1. quantize >= 0.85 of the copy's bandwidth; 2. stochastic over nearest <= 1.4 in
time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import launches, static
from benchmarks.kernel_cases import cases, check_bits
from benchmarks.machine import write_result
from benchmarks.timing import seconds_by_turns

BYTES_PER_ELEMENT = 4
"""What the copy and every kernel must move: BF16 is read and written. Kernels write no scales."""

MOST_STOCHASTIC = 1.4
"""Most seconds of "fp4 1x128, stochastic" wanted, over those of "fp4 1x128"."""


def goals(seconds: Mapping[str, float], fractions: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return what was wanted and what was found, of what was timed."""
    found: list[dict[str, Any]] = []
    for case in cases():
        if case.goal is not None and case.name in fractions:
            name = f"{case.name}, of the copy's bandwidth"
            value = fractions[case.name]
            met = value >= case.goal
            found.append({"name": name, "value": value, "least": case.goal, "met": met})
    stochastic = seconds.get("fp4 1x128, stochastic")
    nearest = seconds.get("fp4 1x128")
    if stochastic is not None and nearest is not None:
        value = stochastic / nearest
        met = value <= MOST_STOCHASTIC
        found.append(
            {"name": "stochastic / nearest", "value": value, "most": MOST_STOCHASTIC, "met": met}
        )
    return found


def measure(shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Return seconds, bandwidth over the copy's, goals and failures of every case."""
    device = torch.device("cuda")
    differing = check_bits(device)
    inputs = itertools.cycle([torch.randn(shape, device=device).bfloat16() for _ in range(3)])
    target = torch.empty_like(next(inputs))

    def rotating(work: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        return lambda: work(next(inputs))

    runs = {"copy": rotating(target.copy_), **{c.name: rotating(c.work) for c in cases()}}
    times = seconds_by_turns(runs, repeats, True, ahead=True)
    moved = BYTES_PER_ELEMENT * target.numel()
    rates = {name: moved / s for name, s in times.seconds.items()}
    fractions = {name: rate / rates["copy"] for name, rate in rates.items()}
    return {
        "device": torch.cuda.get_device_name(device),
        "shape": list(shape),
        "bits_differ": differing,
        "failures": times.failed,
        "seconds": times.seconds,
        "gigabytes_per_s": {name: rate / 1e9 for name, rate in rates.items()},
        "copy_fraction": fractions,
        "goals": goals(times.seconds, fractions),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Time or count, print, write; 1 if bits differ, something failed or registers spill."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--static", action="store_true", help="count instructions and launches; no GPU needed"
    )
    parser.add_argument("--rows", type=int, default=16384, help="rows of the matrix")
    parser.add_argument("--cols", type=int, default=8192, help="columns")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs of each case")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(argv)
    if not (options.static or torch.cuda.is_available()):
        print("No CUDA device here, so no kernel is timed; --static counts instructions.")
        return 0
    if options.static:
        rows = [row for arch in (90, 100) for row in static.table(arch)]
        started = launches.table()
        spills = {r["name"]: "spills" for r in rows if r["spilled"]}
        report = {"compiled": rows, "launches": started, "failures": spills}
        _show_static(rows)
        _show_launches(started)
    else:
        report = measure((options.rows, options.cols), options.repeats)
        _show(report)
    if options.json:
        write_result(options.json, report)
    return int(bool(report.get("bits_differ") or report["failures"]))


def _show_static(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("kernel", "GPU", "instructions/element", "registers", "spilled", "warps")
    for row in rows:
        cells = [row["name"], f"sm_{row['arch']}", f"{row['instructions']:.1f}"]
        cells += [str(row[key]) for key in ("registers", "spilled", "warps")]
        table.add_row(*cells)
    Console().print(table)


def _show_launches(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("what is measured", "launches", "MB")
    for row in rows:
        table.add_row(row["name"], str(row["launches"]), f"{row['bytes'] / 1e6:.0f}")
    Console().print(table)


def _show(report: dict[str, Any]) -> None:
    console = Console()
    table = Table("kernel", "ms", "GB/s", "of copy", title=f"{report['device']}, {report['shape']}")
    for name, seconds in report["seconds"].items():
        fraction = f"{report['copy_fraction'][name]:.3f}"
        table.add_row(
            name, f"{seconds * 1e3:.3f}", f"{report['gigabytes_per_s'][name]:.0f}", fraction
        )
    console.print(table)
    for goal in report["goals"]:
        bound = f">= {goal['least']}" if "least" in goal else f"<= {goal['most']}"
        style = "green" if goal["met"] else "red"
        console.print(f"{goal['name']}: {goal['value']:.3f} ({bound})", style=style)
    for name, why in report["failures"].items():
        console.print(f"{name} failed: {why}", markup=False, style="red")
    if report["bits_differ"]:
        console.print("[red]differ from the CPU reference:[/] " + ", ".join(report["bits_differ"]))


if __name__ == "__main__":
    raise SystemExit(main())
