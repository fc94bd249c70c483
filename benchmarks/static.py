"""What the kernels compile to, without a GPU: instructions per element, registers, spills.

`benchmarks.kernels --static` prints the table. Kernels are launched on CPU tensors against a
driver that only compiles, so what is counted is what training launches. A count is the number of
instructions that a warp issues for its block over the elements of a thread: the path from the
first instruction to EXIT, without the slow path of divisions, each loop as often as it takes to
load the block. A kernel reaches the copy's bandwidth if its count is below what the GPU issues
while it moves an element: about 23 for 4 bytes on an H100 (an estimate, not measured).
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from megatron_snip.formats import FORMATS, Block
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import NO_RANDOM
from megatron_snip.quantizers.quantize import philox_arguments
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.statistics import fused
from megatron_snip.statistics.operands import Operands
from megatron_snip.types import Operand

ROW, COL, SQUARE = (1, 128), (128, 1), (128, 128)
BF16, FP32 = torch.bfloat16, torch.float32
KEY = StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0)
RANDOM = philox_arguments(StochasticStream(KEY), 1024)


def one(fmt: str, block: Block, dtype: torch.dtype = BF16, random: Any = NO_RANDOM) -> Any:
    number = torch.ones(())
    return lambda x: launch.quantize_dequantize(
        x, FORMATS[fmt], block, random, dtype=dtype, amax_or_scale=number
    )


def observed(names: tuple[str, str], operand: Operand) -> Any:
    """Observe an operand in two formats: X [1024, 256], W [512, 256] or G [1024, 512]."""
    formats = tuple(FORMATS[name] for name in names)

    def run(_: torch.Tensor) -> None:
        x = torch.empty((1024, 256), dtype=BF16)
        w = torch.empty((512, 256), dtype=BF16)
        g = torch.empty((1024, 512), dtype=BF16)
        operands = Operands(x, w, g)
        space = fused._Workspace.zeros(operands, formats)
        fused._observe(space, operands, operand, formats, StochasticStream(KEY))

    return run


VARIANTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fp8 1x128": one("fp8", ROW),
    "fp8 1x128 to fp32": one("fp8", ROW, FP32),
    "fp8 128x1": one("fp8", COL),
    "fp8 128x128": one("fp8", SQUARE),
    "fp4 1x128 stochastic": one("fp4", ROW, random=RANDOM),
    "fp4 1x128 stochastic, sharded": one("fp4", ROW, random=RANDOM._replace(mode=launch.SHARDED)),
    "fp4 128x1 stochastic": one("fp4", COL, random=RANDOM._replace(swapped=True)),
    "mxfp8 1x32": one("mxfp8", (1, 32)),
    "nvfp4 1x16": one("nvfp4", (1, 16)),
    "observe X, fp8 and fp4": observed(("fp8", "fp4"), Operand.INPUT),
    "observe W, fp8 and fp4": observed(("fp8", "fp4"), Operand.WEIGHT),
    "observe G, fp8 and fp4": observed(("fp8", "fp4"), Operand.GRAD_OUTPUT),
    "observe W, mxfp8 and mxfp4": observed(("mxfp8", "mxfp4"), Operand.WEIGHT),
}
"""What is compiled; the first kernel that each launches."""


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes:
        kernel: Triton's.
        elements: what a thread handles.
        loaded_bytes: what it loads for each of them.
    """

    kernel: Any
    elements: float
    loaded_bytes: int


@contextmanager
def compiling(arch: int) -> Iterator[list[Compiled]]:
    """Within, launches add compiled kernels to the list and run nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from megatron_snip.kernels import observe, quantize

    compiled: list[Compiled] = []

    class Recorder:
        """Stands for a kernel.

        Attributes:
            kernel: the kernel.
            sides: names of the constants whose product is the elements of a block.
            loaded: names of the arguments that are loaded for each element.
        """

        def __init__(self, kernel: Any, sides: Sequence[str], loaded: Sequence[str]) -> None:
            self.kernel = kernel
            self.sides = sides
            self.loaded = loaded

        def __getitem__(self, grid: Any) -> Any:
            def launched(*args: Any, **named: Any) -> None:
                kernel = self.kernel.warmup(*args, grid=grid, **named)
                threads = 32 * kernel.metadata.num_warps
                elements = math.prod(named[side] for side in self.sides) / threads
                by_name = dict(zip(self.kernel.arg_names, args, strict=False))
                loaded = sum(by_name[name].itemsize for name in self.loaded)
                compiled.append(Compiled(kernel, elements, loaded))

            return launched

    recorders = [
        (quantize, "quantize_kernel", ("R", "C"), ("x_ptr",)),
        (observe, "observe_kernel", ("R", "C"), ("x_ptr",)),
    ]
    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,  # kernels are cached per device
        get_current_stream=lambda device: 0,
    )
    with ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", stand_in))
        for module, name, sides, loaded in recorders:
            recorder = Recorder(getattr(module, name), sides, loaded)
            stack.enter_context(patch.object(module, name, recorder))
        yield compiled


def compiled(name: str, arch: int) -> Compiled:
    """Return a variant compiled for an architecture (90, 100)."""
    with compiling(arch) as kernels:
        VARIANTS[name](torch.randn(256, 4096).bfloat16())
    return kernels[0]


def resources(kernel: Any, arch: int) -> tuple[int, int]:
    """Return (registers per thread, bytes of spilled registers), from ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.asm["ptx"]
    target = re.search(r"^\.target ([^\s,]+)", ptx, re.MULTILINE)
    assert target
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", source.name]
        done = subprocess.run(
            [*command, "-o", "/dev/null"], capture_output=True, text=True, check=True
        )
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers
    return int(registers[1]), sum(map(int, spills))


def instructions_per_element(compiled: Compiled) -> float:
    """Return the instructions that a thread executes for each of its elements."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loaded_bytes = compiled.loaded_bytes * compiled.elements
    return executed(text, loaded_bytes) / compiled.elements


def table(arch: int) -> list[dict[str, Any]]:
    """Return what each variant compiles to for an architecture."""
    rows = []
    for name in VARIANTS:
        made = compiled(name, arch)
        registers, spilled = resources(made.kernel, arch)
        row = {"name": name, "arch": arch, "warps": made.kernel.metadata.num_warps}
        row |= {"instructions": instructions_per_element(made)}
        rows.append({**row, "registers": registers, "spilled": spilled})
    return rows


_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z0-9.]+)(.*?);", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)


def executed(sass: str, loaded_bytes: float) -> float:
    """Return the instructions on the common path of a kernel as nvdisasm prints it.

    Args:
        sass: the code.
        loaded_bytes: what a thread loads in all turns of a loop.
    """
    code = [(m.start(), bool(m[1]), m[2], m[3]) for m in _CODE.finditer(sass)]
    at = [position for position, *_ in code]
    labels = {m[1]: sum(p < m.start() for p in at) for m in _LABEL.finditer(sass)}
    path: list[int] = []
    loops: list[tuple[int, int]] = []
    i = 0
    while i < len(code):
        _, guarded, name, rest = code[i]
        path.append(i)
        if name == "EXIT" and not guarded:
            break
        target = re.search(r"\((\.L_x_\d+)\)", rest) if name.startswith("BRA") else None
        to = labels[target[1]] if target else 0
        if target and to <= i:
            loops.append((to, i))
        elif target and (not guarded or any("CALL" in c[2] for c in code[i:to])):
            i = to
            continue
        i += 1
    count = float(len(path))
    for first, last in loops:
        body = [j for j in path if first <= j <= last]
        count += (loaded_bytes / sum(_loaded(code[j][2]) for j in body) - 1) * len(body)
    return count


def _loaded(name: str) -> int:
    if not name.startswith("LDG"):
        return 0
    width = re.search(r"\.(\d+|U16|U8)\b", name.replace(".E", "", 1))
    return {"128": 16, "64": 8, "U16": 2, "U8": 1}[width[1]] if width else 4
