"""Every kernel compiles for Hopper and Blackwell without a GPU, and no register spills.

Kernels are launched on CPU tensors against a driver that only compiles, so what is checked is what
training launches. A spilled register travels through memory, whose bandwidth these kernels need.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("compiling needs Triton without its interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from megatron_snip.formats import FORMATS
from megatron_snip.kernels import launch, quantize
from megatron_snip.quantizers import StochasticStream, StreamKey
from megatron_snip.quantizers.quantize import _philox_arguments

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROW, COL, SQUARE = (1, 128), (128, 1), (128, 128)
FP8, FP4 = FORMATS["fp8"], FORMATS["fp4"]
BF16, FP32 = torch.bfloat16, torch.float32
KEY = StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0)
RANDOM = _philox_arguments(StochasticStream(KEY), 1024)


def one(fmt: str, block: tuple[int, int], dtype: torch.dtype = BF16, **options: Any) -> Any:
    options.setdefault("tensor_amax", torch.ones(()))
    return lambda x: launch.quantize_dequantize(x, FORMATS[fmt], block, dtype=dtype, **options)


def both(fmt: str, **options: Any) -> Any:
    formats, blocks = (FORMATS[fmt],) * 2, (ROW, COL)
    return lambda x: launch.quantize_dequantize_both(x, formats, blocks, dtype=BF16, **options)


def norms(block: tuple[int, int]) -> Any:
    return lambda x: launch.error_norms(x, ((FP8, block), (FP4, block)))


VARIANTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fp8 1x128": one("fp8", ROW),
    "fp8 1x128 to fp32": one("fp8", ROW, FP32),
    "fp8 128x1": one("fp8", COL),
    "fp8 128x128": one("fp8", SQUARE),
    "fp4 1x128 stochastic": one("fp4", ROW, random=RANDOM),
    "fp4 1x128 stochastic, sharded": one("fp4", ROW, random=RANDOM._replace(mode=2)),
    "fp4 128x1 stochastic": one("fp4", COL, random=RANDOM),
    "mxfp8 1x32": one("mxfp8", (1, 32)),
    "nvfp4 1x16": one("nvfp4", (1, 16)),
    "fp8 both": both("fp8"),
    "fp4 both stochastic": both("fp4", random=(RANDOM, RANDOM)),
    "norms 1x128": norms(ROW),
    "norms 128x1": norms(COL),
    "norms 128x128": norms(SQUARE),
}


class CompileOnly:
    """Stands in for the CUDA driver when a launch compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Within, launches add compiled kernels to the list and run nothing."""
    compiled: list[Any] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *a, **k: compiled.append(self.kernel.warmup(*a, grid=grid, **k))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", CompileOnly(arch))
        for name in ("quantize_kernel", "quantize_both_kernel", "error_norms_kernel"):
            patch.setattr(quantize, name, Recorder(getattr(quantize, name)))
        yield compiled


def compiled(name: str, arch: int) -> Any:
    with compiling(arch) as kernels:
        VARIANTS[name](torch.randn(256, 1024).bfloat16())
    return kernels[0]


def resources(kernel: Any, arch: int, folder: Any) -> tuple[int, int]:
    """(registers per thread, bytes of spilled registers), from ptxas."""
    ptx = kernel.asm["ptx"]
    target = re.search(r"^\.target ([^\s,]+)", ptx, re.MULTILINE)
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", source, "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return int(re.search(r"Used (\d+) registers", done.stderr)[1]), sum(map(int, spills))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_everything_compiles_without_spills(arch, tmp_path, capsys):
    found = {name: resources(compiled(name, arch), arch, tmp_path) for name in VARIANTS}
    with capsys.disabled():
        print(f"\nsm_{arch}: registers (spilled bytes):", found)
    assert not any(spilled for _, spilled in found.values())


def test_enough_programs_fit_to_hide_latency(tmp_path):
    """Registers leave room for at least 512 threads on a multiprocessor (of 65536 registers)."""
    kernel = compiled("fp8 both", 90)
    registers, spilled = resources(kernel, 90, tmp_path)
    threads = kernel.metadata.num_warps * 32
    assert 65536 // (registers * threads) * threads >= 512 and spilled == 0


def test_the_quotient_is_rounded_before_it_is_rounded_to_the_grid():
    """Fused into one operation, x * encode + anchor would round once, and ties otherwise."""
    lines = compiled("fp8 1x128", 90).asm["ptx"].splitlines()
    fused = [line for line in lines if "fma.rn.f32" in line]
    anchors = "0f49C00000", "0fC9C00000"  # 1.5 * 2^20, either sign
    config = launch.ROW_CONFIG
    assert len(fused) == 2 * config.rows * config.cols // (32 * config.num_warps)
    assert all(any(anchor in line for anchor in anchors) for line in fused)


def test_new_steps_and_streams_do_not_recompile():
    """Training launches with a new key every step; a compilation each time would stall it."""
    x = torch.randn(64, 256).bfloat16()
    with compiling(90) as kernels:
        for step in range(5):
            stream = StochasticStream(replace(KEY, iteration=step))
            one("fp4", ROW, random=_philox_arguments(stream, 256))(x)
        for small in (1, -5, 2**31):  # a key is 64 bits, however few it needs
            one("fp4", ROW, random=RANDOM._replace(key=small, columns=(256, 256, 256, 0)))(x)
    hashes = [kernel.hash for kernel in kernels]
    assert len(hashes) == 8 and len(set(hashes[:5])) == 1 and len(set(hashes[5:])) == 1
