"""Compiling the kernels for a GPU that is not there: registers, spills and shared memory.

`python -m megatron_snip.kernels.compilation [--arch 90 100]` compiles every variant that training
uses with Triton's own compiler and ptxas, and prints what each needs. Spilled registers travel
through memory and would cost the bandwidth that these kernels live on, so a variant that spills
is a failure (exit code 1).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatron_snip.formats import FORMATS, Format
from megatron_snip.kernels.grid import make_grid
from megatron_snip.kernels.launch import (
    COL_STEP,
    MOMENTS_LAUNCH,
    ROW_STEP,
    default_launch,
    norms_launch,
)
from megatron_snip.kernels.norms import error_norms_kernel, moments_kernel
from megatron_snip.kernels.quantize import quantize_both_kernel, quantize_kernel

Arguments = dict[str, str | int]
"""Kernel argument -> its type in Triton's spelling, or the number it is specialized to."""

_PLACE: Arguments = {
    "global_cols": "i32:16",
    "local_chunk": "i32:16",
    "global_chunk": "i32:16",
    "col_start": "i32",
    "row_start": "i32",
}


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    Attributes:
        name: what the table shows.
        kernel: the jitted function.
        arguments: types of its run-time arguments; `:16` marks multiples of 16.
        constants: its compile-time arguments.
        num_warps: warps a program.
    """

    name: str
    kernel: Any
    arguments: Arguments
    constants: dict[str, Any]
    num_warps: int


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: per thread.
        spilled_bytes: stores and loads of spilled registers, per thread.
        shared_bytes: shared memory of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


def variants() -> list[Variant]:
    """The variants that training uses, in BF16 (and one in FP32)."""
    fp8, fp4, mxfp8, nvfp4 = (FORMATS[name] for name in ("fp8", "fp4", "mxfp8", "nvfp4"))
    return [
        _one("fp8 1x128 payload", fp8, (1, 128), "*u8"),
        _one("fp8 1x128 bf16", fp8, (1, 128), "*bf16"),
        _one("fp8 1x128 fp32 to fp32", fp8, (1, 128), "*fp32", source="*fp32"),
        _one("fp4 1x128 stochastic payload", fp4, (1, 128), "*u8", mode=1),
        _one("fp4 1x128 stochastic bf16", fp4, (1, 128), "*bf16", mode=2),
        _one("fp4 128x1 payload, transposed", fp4, (128, 1), "*u8", transpose=True),
        _one("fp4 128x1 stochastic bf16", fp4, (128, 1), "*bf16", mode=1),
        _one("fp8 128x128 payload", fp8, (128, 128), "*u8"),
        _one("fp4 128x128 bf16", fp4, (128, 128), "*bf16"),
        _one("mxfp8 1x32 payload", mxfp8, (1, 32), "*u8"),
        _one("nvfp4 1x16 bf16", nvfp4, (1, 16), "*bf16"),
        _both("fp8 both payloads", fp8, "*u8"),
        _both("fp4 both payloads, stochastic", fp4, "*u8", mode=1),
        _both("fp4 both bf16, stochastic", fp4, "*bf16", mode=1),
        _norms("error norms fp8+fp4 1x128", (1, 128)),
        _norms("error norms fp8+fp4 128x1", (128, 1)),
        _norms("error norms fp8+fp4 128x128", (128, 128)),
        Variant(
            "moments",
            moments_kernel,
            {**_source("*bf16"), "rows": "i32:16", "cols": "i32:16", **_pointers("*fp32", 2)},
            {"R": MOMENTS_LAUNCH.rows, "C": MOMENTS_LAUNCH.cols},
            MOMENTS_LAUNCH.num_warps,
        ),
    ]


def compile_variant(variant: Variant, arch: int) -> Resources:
    """Compile for compute capability `arch` (90: Hopper, 100: Blackwell).

    Raises:
        RuntimeError: if ptxas refuses the code; its words are in the message.
    """
    kernel = compiled(variant, arch)
    registers, spilled = _assemble(kernel.asm["ptx"], arch)
    return Resources(registers, spilled, kernel.metadata.shared)


def compiled(variant: Variant, arch: int) -> Any:
    """Return Triton's compiled kernel for compute capability `arch`."""
    names = variant.kernel.arg_names
    signature = dict.fromkeys(names, "constexpr")
    constants = {(names.index(k),): v for k, v in variant.constants.items()}
    attributes = {}
    # pointers are named after what they hold, so arguments are matched by position
    runtime = [name for name in names if name not in variant.constants]
    for name, kind in zip(runtime, variant.arguments.values(), strict=True):
        spot = (names.index(name),)
        if isinstance(kind, int):
            constants[spot] = kind
            continue
        signature[name], _, divisor = kind.partition(":")
        if divisor or kind.startswith("*"):
            attributes[spot] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, constants, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": variant.num_warps}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compile everything, print a table; 1 if anything spills."""
    parser = argparse.ArgumentParser(description="Compile the kernels without a GPU.")
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 100], help="e.g. 90 100")
    spills = 0
    for arch in parser.parse_args(argv).arch:
        print(f"sm_{arch}, triton {triton.__version__}")
        for variant in variants():
            found = compile_variant(variant, arch)
            spills += found.spilled_bytes > 0
            print(
                f"  {variant.name:34} warps {variant.num_warps:2}  registers {found.registers:3}  "
                f"spilled {found.spilled_bytes:4} B  shared {found.shared_bytes:6} B"
            )
    return 1 if spills else 0


def _source(kind: str) -> Arguments:
    return {"x": kind, "x_row": "i32:16", "x_col": 1}


def _pointers(kind: str, count: int) -> Arguments:
    return {f"{kind}{i}": kind for i in range(count)}


def _one(
    name: str,
    fmt: Format,
    block: tuple[int, int],
    out: str,
    *,
    source: str = "*bf16",
    mode: int = 0,
    transpose: bool = False,
) -> Variant:
    grid = make_grid(fmt, block)
    launch = default_launch(grid)
    arguments: Arguments = {
        **_source(source),
        "amax": "*fp32",
        "rows": "i32:16",
        "cols": "i32:16",
        **_target("", out, transpose),
        "key": "i64",
        **_PLACE,
    }
    constants = {
        "R": launch.rows,
        "C": launch.cols,
        "GRID": grid,
        "PAYLOAD": out == "*u8",
        "MODE": mode,
        "NATIVE_CASTS": True,
    }
    return Variant(name, quantize_kernel, arguments, constants, launch.num_warps)


def _both(name: str, fmt: Format, out: str, mode: int = 0) -> Variant:
    grids = make_grid(fmt, (1, fmt.tile)), make_grid(fmt, (fmt.tile, 1))
    launch = default_launch(*grids)
    payload = out == "*u8"
    arguments: Arguments = {
        **_source("*bf16"),
        "amax": "*fp32",
        "rows": "i32:16",
        "cols": "i32:16",
        **_target("a", out, False),
        **_target("b", out, payload),
        "row_key": "i64",
        "col_key": "i64",
        **_PLACE,
    }
    constants = {
        "R": launch.rows,
        "C": launch.cols,
        "ROW_GRID": grids[0],
        "COL_GRID": grids[1],
        "PAYLOAD": payload,
        "ROW_MODE": mode,
        "COL_MODE": mode,
        "ROW_STEP": ROW_STEP,
        "COL_STEP": COL_STEP,
        "NATIVE_CASTS": True,
    }
    return Variant(name, quantize_both_kernel, arguments, constants, launch.num_warps)


def _norms(name: str, block: tuple[int, int]) -> Variant:
    launch, steps = norms_launch(*block)
    arguments: Arguments = {
        **_source("*bf16"),
        "amax": "*fp32",
        "rows": "i32:16",
        "cols": "i32:16",
        "sums": "*fp32",
    }
    fp8, fp4 = (make_grid(FORMATS[name], block) for name in ("fp8", "fp4"))
    constants = {
        "R": launch.rows,
        "C": launch.cols,
        "STEPS": steps,
        "GRID_0": fp8,
        "GRID_1": fp4,
        "GRID_2": fp4,
        "GRID_3": fp4,
        "COUNT": 2,
        "ROWS": True,
    }
    return Variant(name, error_norms_kernel, arguments, constants, launch.num_warps)


def _target(name: str, out: str, transpose: bool) -> Arguments:
    strides: tuple[str | int, str | int] = (1, "i32:16") if transpose else ("i32:16", 1)
    scale_strides = ("i32:16", 1) if transpose else (1, "i32:16")
    kinds = (out, *strides, "*fp32", *scale_strides)
    return {f"{name}{i}": kind for i, kind in enumerate(kinds)}


def _assemble(ptx: str, arch: int) -> tuple[int, int]:
    """(registers, spilled bytes) as ptxas reports them."""
    target = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    assert target is not None
    name = target[1].rstrip(",")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas for {name} failed: {done.stderr.strip()[:500]}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert registers is not None, done.stderr
    return int(registers[1]), sum(map(int, spills))


if __name__ == "__main__":
    raise SystemExit(main())
