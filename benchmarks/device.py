"""What a GPU can do, and whether it computes what the CPU does: the first thing to run on one.

    python -m benchmarks.device [--json FILE]

Ceilings: bandwidth of a copy, rate of a BF16 GEMM of 8192^3. Checks, each by itself, so that one
that fails says which and why:

    pairs       fprop's, dgrad's and wgrad's FP8 GEMM at 1 to 64 scale blocks of depth, ragged dims
                and a single token, against FP64 from the same bytes (`native_support.gemm_error`)
    bits        kernels that write rows and transposed bytes at once, on an ordinary and on another
                stream, against the CPU: all bytes and scales alike
    norms       sums of squares and of quantization errors against the CPU, relative
    waits       a forward and backward of a native linear, which must not wait for the GPU

Without a GPU the same code runs on the CPU's emulation, at fewer depths. Exit status 1 if anything
differs.
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
from megatron_snip.linears.native_gemm import alignment
from megatron_snip.linears.native_support import (
    RAGGED,
    gemm_error,
    native_obstacle,
    sample_operands,
)
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_cases import FP4, FP8, OTHER, ROW, STREAM, TOKENS, same
from benchmarks.linear import forwards
from benchmarks.machine import has_gpu, write_result
from benchmarks.timing import said, seconds_by_turns
from megatron_snip.linears import native
from megatron_snip.quantizers import error_norms, moments, quantize_payload_both
from megatron_snip.types import Gemm

DEPTHS = (1, 2, 3, 5, 8, 32, 64)
"""Scale blocks along the contraction; the last ones are those of real layers."""

GPU_SIDE, CPU_SIDE = 8192, 512
"""Rows and columns of what the ceilings are measured with."""

NORMS_TOLERANCE = 1e-5
"""Relative: FP32 sums of some ten thousand numbers in another order."""

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


def pair_shape(gemm: Gemm, depth: int) -> tuple[int, int, int]:
    """Return (tokens, in_features, out_features) with this GEMM's contraction `depth` long."""
    return {
        Gemm.FPROP: (256, depth, 384),
        Gemm.DGRAD: (256, 384, depth),
        Gemm.WGRAD: (depth, 256, 384),
    }[gemm]


def checks(depths: Sequence[int], with_native: bool) -> dict[str, tuple[Check, float]]:
    """Return name -> (check, the largest value that is right); truth values are 0 if right."""
    found: dict[str, tuple[Check, float]] = {}
    if with_native:
        for gemm in Gemm:
            for depth in depths:
                shape = pair_shape(gemm, 128 * depth)
                name = f"{gemm}, {depth} blocks"
                found[name] = _pair(gemm, shape), native.DEVICE_TOLERANCE
            for shape in RAGGED:
                name = f"{gemm}, {'x'.join(map(str, shape))}"
                found[name] = _pair(gemm, shape), native.DEVICE_TOLERANCE
    for rows, cols in ((517, 1037), (2048, 4096)):
        found[f"both directions, {rows}x{cols}"] = _bits(rows, cols), 0.0
    found["both directions, on another stream"] = _bits(512, 1024, other_stream=True), 0.0
    found["error norms and moments"] = _norms, NORMS_TOLERANCE
    if with_native:
        found["a linear waits for the GPU"] = _waits, 0.0
    return found


def run(device: torch.device, depths: Sequence[int] = DEPTHS) -> dict[str, Any]:
    """Return ceilings, and every check's value, bound and failure."""
    gpu = device.type == "cuda"
    obstacle = native_obstacle(torch.cuda.get_device_capability()) if gpu else ""
    report: dict[str, Any] = {
        "native_obstacle": obstacle,
        "dims_padded_to": alignment(),
        "checks": [],
        "failures": {},
    }
    try:
        report |= ceilings(device)
    except Exception as error:
        report["failures"]["ceilings"] = said(error)
    # what the start-up check refuses is looked at all the same: here is where one wants to know
    hopper = not gpu or torch.cuda.get_device_capability()[0] == 9
    for name, (check, most) in checks(depths, hopper).items():
        try:
            value = float(check(device))
        except Exception as error:  # the other checks go on
            report["failures"][name] = said(error)
            continue
        met = value <= most
        report["checks"].append({"name": name, "value": value, "most": most, "met": met})
    return report


def _pair(gemm: Gemm, shape: tuple[int, int, int]) -> Check:
    def check(device: torch.device) -> float:
        errors = []
        for name in ("fp8", "fp4"):
            a, b = sample_operands(name, device, shape)[gemm]
            for dtype in (torch.float32, torch.bfloat16):
                errors.append(gemm_error(a, b, dtype))
        return max(errors, key=lambda error: error if error == error else torch.inf)

    return check


def _bits(rows: int, cols: int, other_stream: bool = False) -> Check:
    """Whether any byte or scale differs from the CPU's."""

    def check(device: torch.device) -> bool:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, cols, generator=generator)
        x = (x * torch.exp2(torch.randint(-9, 9, (rows, 1), generator=generator))).bfloat16()
        stream: Any = contextlib.nullcontext()
        if other_stream and device.type == "cuda":
            make: Any = torch.cuda.Stream
            stream = torch.cuda.stream(make())
        with stream:
            there = x.to(device)
            found = [_both(there, fmt) for fmt in (FP8, FP4)]
            found = [[(part.codes.cpu(), part.scales.cpu()) for part in pair] for pair in found]
        wanted = [[(part.codes, part.scales) for part in _both(x, fmt)] for fmt in (FP8, FP4)]
        return not all(
            same(a, b)
            for f, w in zip(found, wanted, strict=True)
            for a, b in zip(f, w, strict=True)
        )

    return check


def _both(x: torch.Tensor, fmt: Any) -> Any:
    streams = (STREAM, OTHER) if fmt is FP4 else (None, None)
    return quantize_payload_both(x, (fmt, fmt), (ROW, TOKENS), streams=streams)


def _norms(device: torch.device) -> float:
    """Largest relative difference to the CPU."""
    x = torch.randn(1000, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    there, specs = x.to(device), ((FP8, ROW), (FP4, ROW))
    found = [error_norms(there, specs, rowwise=rows) for rows in (False, True)]
    found += [error_norms(there, ((FP4, TOKENS),)), *moments(there)]
    wanted = [error_norms(x, specs, rowwise=rows) for rows in (False, True)]
    wanted += [error_norms(x, ((FP4, TOKENS),)), *moments(x)]
    return max(
        float(((a.cpu().double() - b.double()).abs() / b.double()).max())
        for a, b in zip(found, wanted, strict=True)
    )


def _waits(device: torch.device) -> bool:
    """Whether a step of a native linear makes the host wait; the error says where."""
    x, w = (torch.randn(256, 512, device=device).bfloat16().requires_grad_() for _ in range(2))
    g = torch.randn(256, 256, device=device).bfloat16()
    forward = forwards(x, w, with_native=True)["fp4 native"]
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
    if report["native_obstacle"]:
        console.print(f"nothing native: {report['native_obstacle']}", markup=False)
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
    report = run(torch.device("cuda" if gpu else "cpu"), DEPTHS if gpu else DEPTHS[:3])
    if args.json:
        write_result(args.json, report)
    show(report, Console())
    return 0 if all(check["met"] for check in report["checks"]) and not report["failures"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
