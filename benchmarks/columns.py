"""Block sizes of the kernels for tiles along the column: counted anywhere, timed on a GPU.

    python -m benchmarks.columns [--static] [--json FILE]

Counted (compiled for sm_90, nothing is run): instructions for each element, registers, spills, and
the bytes that an SM's threads load before they wait:

    bytes in flight = threads of an SM * elements of a thread * 2
    threads of an SM: as many complete blocks as its 65,536 registers, 64 warps and 227 KB of shared
                      memory hold

Timed: seconds and the fraction of a copy's bandwidth, in turns with the copy. The output of each
configuration must have the bits of the standard one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import static
from benchmarks.kernel_cases import same
from benchmarks.machine import has_gpu, write_result
from benchmarks.timing import seconds_by_turns
from megatron_snip.formats import FORMATS
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import NO_RANDOM, LaunchConfig

ARCH = 90
CONFIGS = tuple(
    LaunchConfig(*sizes)
    for sizes in (
        (128, 64, 4),
        (128, 128, 8),
        (128, 64, 8),
        (128, 32, 4),
        (128, 32, 2),
        (128, 128, 16),
    )
)
KINDS = {
    "fp8": ("fp8", NO_RANDOM),
    "fp4": ("fp4", NO_RANDOM),
    "fp4 stochastic": ("fp4", static.RANDOM._replace(swapped=True)),
}
BYTES_MOVED = 4
"""Of an element: BF16 is read and written."""


def work(kind: str, config: LaunchConfig | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what quantizes a matrix in tiles of 128x1; None takes the standard configuration."""
    fmt, random = KINDS[kind]
    return lambda x: launch.quantize_dequantize(
        x, FORMATS[fmt], static.COL, random, dtype=torch.bfloat16, config=config
    )


def bytes_in_flight(registers: int, warps: int, shared: int, elements: float) -> float:
    """Return the bytes of BF16 that the threads of an SM load at once.

    Args:
        registers: of a thread; a warp gets a multiple of 256.
        warps: of a block.
        shared: bytes of shared memory of a block.
        elements: of a thread.
    """
    registers_of_block = 32 * warps * (-(-registers // 8) * 8)
    blocks = min(65536 // registers_of_block, 64 // warps, 32)
    if shared:
        blocks = min(blocks, 227 * 1024 // shared)
    return blocks * 32 * warps * elements * 2


def count(kind: str, config: LaunchConfig) -> dict[str, Any]:
    """Return what a configuration compiles to."""
    with static.compiling(ARCH) as kernels:
        work(kind, config)(torch.randn(256, 4096).bfloat16())
    (made,) = kernels
    registers, spilled = static.resources(made.kernel, ARCH)
    shared = made.kernel.metadata.shared
    return {
        "kernel": kind,
        "config": list(config),
        "instructions": static.instructions_per_element(made),
        "registers": registers,
        "spilled": spilled,
        "bytes_in_flight": bytes_in_flight(registers, config.num_warps, shared, made.elements),
    }


def measure(device: torch.device, shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Return seconds and fractions of the copy's bandwidth."""
    inputs = itertools.cycle([torch.randn(shape, device=device).bfloat16() for _ in range(3)])
    target = torch.empty_like(next(inputs))
    rows = [(kind, config) for kind in KINDS for config in CONFIGS]
    runs: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(next(inputs))}

    def rotating(run: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        return lambda: run(next(inputs))

    for kind, config in rows:
        runs[_name(kind, config)] = rotating(work(kind, config))
    ragged = torch.randn(517, 1037, device=device).bfloat16()
    differing = [
        _name(kind, config)
        for kind, config in rows
        if not same(work(kind, config)(ragged), work(kind, None)(ragged).cpu())
    ]
    gpu = device.type == "cuda"
    times = seconds_by_turns(runs, repeats, gpu, ahead=gpu)
    fractions = {name: times.seconds["copy"] / s for name, s in times.seconds.items()}
    return {
        "shape": list(shape),
        "bits_differ": differing,
        "seconds": times.seconds,
        "copy_gigabytes_per_s": BYTES_MOVED * target.numel() / times.seconds["copy"] / 1e9,
        "copy_fraction": fractions,
        "best": {
            kind: max(CONFIGS, key=lambda config: fractions.get(_name(kind, config), 0.0))
            for kind in KINDS
        },
        "failures": times.failed,
    }


def _name(kind: str, config: LaunchConfig) -> str:
    return f"{kind}, {config.rows}x{config.cols}, {config.num_warps} warps"


def main(argv: Sequence[str] | None = None) -> int:
    """Count or time, print, write; 1 if bits differ or something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--static", action="store_true", help="count; no GPU needed")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if args.static or not has_gpu():
        rows = [count(kind, config) for kind in KINDS for config in CONFIGS]
        report: dict[str, Any] = {"counted": rows, "arch": ARCH}
        table = Table("kernel", "block", "warps", "instructions", "registers", "spilled", "KB")
        for row in rows:
            height, width, warps = row["config"]
            cells = [row["kernel"], f"{height}x{width}", str(warps), f"{row['instructions']:.1f}"]
            cells += [str(row["registers"]), str(row["spilled"])]
            table.add_row(*cells, f"{row['bytes_in_flight'] / 1024:.0f}")
    else:
        report = measure(torch.device("cuda"), (16384, 8192), args.repeats)
        table = Table("kernel", "ms", "of copy")
        for name, seconds in report["seconds"].items():
            table.add_row(name, f"{1e3 * seconds:.3f}", f"{report['copy_fraction'][name]:.3f}")
    Console().print(table)
    if args.json:
        write_result(args.json, report)
    return int(bool(report.get("failures") or report.get("bits_differ")))


if __name__ == "__main__":
    raise SystemExit(main())
