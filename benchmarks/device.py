"""What a GPU can do, and whether it computes what the CPU does: the first thing to run on one.

    python -m benchmarks.device [--json FILE]

Ceilings: bandwidth of a copy, rate of a BF16 GEMM of 8192^3. Checks:

    bits        every kernel of `benchmarks.kernels`, on an ordinary and on another stream, against
                the CPU: all bits equal
    GEMM        BF16 that a GEMM writes itself against its FP32, cast
    waits       a forward and backward of a simulated linear, which must not wait for the GPU

Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_cases import Case, cases, same
from benchmarks.linear import forwards
from benchmarks.machine import has_gpu, write_result
from benchmarks.timing import said, seconds_by_turns
from megatron_snip.matmul import matmul_fp32

GPU_SIDE, CPU_SIDE = 8192, 512
"""Rows and columns of what the ceilings are measured with."""

Check = Callable[[torch.device], bool | float]


def ceilings(device: torch.device) -> dict[str, float]:
    """Return copy bandwidth (bytes read and written) and BF16 GEMM rate."""
    gpu = device.type == "cuda"
    side = GPU_SIDE if gpu else CPU_SIDE
    x, y = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    big = torch.randn(side * (4 if gpu else 1), side, device=device).bfloat16()
    target = torch.empty_like(big)
    runs = {"copy": lambda: target.copy_(big), "gemm": lambda: x @ y}
    seconds = seconds_by_turns(runs, 10 if gpu else 2, gpu, ahead=True).seconds
    return {
        "copy_gigabytes_per_s": 2 * big.nbytes / seconds["copy"] / 1e9,
        "bf16_tflops": 2 * side**3 / seconds["gemm"] / 1e12,
    }


def checks() -> dict[str, tuple[Check, float]]:
    """Return name -> (check, the largest value that is right); truth values are 0 if right."""
    found: dict[str, tuple[Check, float]] = {}
    for case in cases():
        found[case.name] = _bits(case, (517, 1037)), 0.0
    last = cases()[-1]
    found[f"{last.name}, on another stream"] = _bits(last, (512, 1024), other_stream=True), 0.0
    found["GEMM to BF16 against FP32 and a cast"] = _gemm, 0.0
    found["a linear waits for the GPU"] = _waits, 0.0
    return found


def run(device: torch.device) -> dict[str, Any]:
    """Return ceilings, and every check's value, bound and failure."""
    report: dict[str, Any] = {"checks": [], "failures": {}}
    try:
        report |= ceilings(device)
    except Exception as error:
        report["failures"]["ceilings"] = said(error)
    for name, (check, most) in checks().items():
        try:
            value = float(check(device))
        except Exception as error:  # the other checks go on
            report["failures"][name] = said(error)
            continue
        met = value <= most
        report["checks"].append({"name": name, "value": value, "most": most, "met": met})
    return report


def _bits(case: Case, shape: tuple[int, int], other_stream: bool = False) -> Check:
    """Whether any bit differs from the CPU's."""

    def check(device: torch.device) -> bool:
        generator = torch.Generator().manual_seed(shape[0])
        x = torch.randn(shape, generator=generator)
        x = (x * torch.exp2(torch.randint(-9, 9, (shape[0], 1), generator=generator))).bfloat16()
        stream: Any = contextlib.nullcontext()
        if other_stream and device.type == "cuda":
            make: Any = torch.cuda.Stream
            stream = torch.cuda.stream(make())
        with stream:
            found = case.work(x.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return not same(found, case.work(x))

    return check


def _gemm(device: torch.device) -> bool:
    """Whether any bit differs, at the shapes of fprop and of wgrad."""
    generator = torch.Generator().manual_seed(0)
    sides = ((2048, 4096, 4096), (1024, 8192, 512)) if device.type == "cuda" else ((64, 96, 32),)
    for m, k, n in sides:
        a = torch.randn(m, k, generator=generator).bfloat16().to(device)
        b = torch.randn(k, n, generator=generator).bfloat16().to(device)
        if not torch.equal(matmul_fp32(a, b, torch.bfloat16), matmul_fp32(a, b).bfloat16()):
            return True
    return False


def _waits(device: torch.device) -> bool:
    """Whether a forward and backward makes the host wait; the error says where."""
    x, w = (torch.randn(256, 512, device=device).bfloat16().requires_grad_() for _ in range(2))
    g = torch.randn(256, 256, device=device).bfloat16()
    forward = forwards(x, w)["fp4 simulate"]
    backward: Any = forward().backward
    backward(g)  # the first use compiles
    if device.type != "cuda":
        return False
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward = forward().backward
        backward(g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def show(report: dict[str, Any], console: Console) -> None:
    """Print ceilings and a table of checks."""
    if "bf16_tflops" in report:
        console.print(
            f"copy {report['copy_gigabytes_per_s']:.0f} GB/s, "
            f"BF16 GEMM {report['bf16_tflops']:.3g} TFLOPS"
        )
    table = Table("check", "value", "at most")
    for check in report["checks"]:
        style = "green" if check["met"] else "red"
        table.add_row(check["name"], f"{check['value']:.2e}", f"{check['most']:.2e}", style=style)
    console.print(table)
    for name, why in report["failures"].items():
        console.print(f"{name} failed: {why}", markup=False, style="red")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if something differs or failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    gpu = has_gpu()
    report = run(torch.device("cuda" if gpu else "cpu"))
    if args.json:
        write_result(args.json, report)
    show(report, Console())
    return 0 if all(check["met"] for check in report["checks"]) and not report["failures"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
