"""Every kernel compiles for Hopper and Blackwell without a GPU, and no register spills."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("compiling needs Triton without its interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron_snip.formats import FORMATS
from megatron_snip.kernels import launch
from megatron_snip.kernels.compilation import compile_variant, compiled, main, variants
from megatron_snip.quantizers import StochasticStream, StreamKey, StreamLayout
from megatron_snip.quantizers.routes import _draws

NAMES = [variant.name for variant in variants()]


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("arch", [90, 100])
def test_everything_compiles_without_spills(arch, capsys):
    with capsys.disabled():
        print()
        assert main(["--arch", str(arch)]) == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_enough_programs_fit_to_hide_latency():
    """Registers leave room for at least 512 threads on a multiprocessor (of 65536 registers)."""
    chosen = next(v for v in variants() if v.name == "fp8 both payloads")
    used = compile_variant(chosen, 90)
    programs = 65536 // (used.registers * chosen.num_warps * 32)
    assert programs * chosen.num_warps * 32 >= 512 and used.spilled_bytes == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_quotient_is_rounded_before_it_is_rounded_to_the_grid():
    """Fused into one operation, x * encode + anchor would round once, and ties otherwise."""
    chosen = next(v for v in variants() if v.name == "fp8 1x128 payload")
    lines = compiled(chosen, 90).asm["ptx"].splitlines()
    fused = [line for line in lines if "fma.rn.f32" in line]
    anchors = "0f49C00000", "0fC9C00000"  # 1.5 * 2^20, either sign
    per_thread = chosen.constants["R"] * chosen.constants["C"] // (32 * chosen.num_warps)
    assert len(fused) == 2 * per_thread
    assert all(any(anchor in line for anchor in anchors) for line in fused)


class _Hopper:
    """Stands in for the CUDA driver, as far as compiling for a launch asks."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_new_steps_and_streams_do_not_recompile(monkeypatch):
    """Training launches with a new key every step; a compilation each time would stall it."""
    kernel, compiled = launch.quantize_kernel, []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *a, **k: compiled.append(kernel.warmup(*a, grid=grid, **k).hash)

    monkeypatch.setattr(launch, "quantize_kernel", Recorder())
    monkeypatch.setattr(driver, "_active", _Hopper())
    x = torch.randn(64, 256).bfloat16()
    key = StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 0, 0)
    for step in range(20):
        stream = StochasticStream(replace(key, step=step), StreamLayout(row_start=3 * step))
        draws = _draws(stream, 256)
        launch.quantize_payload(x, FORMATS["fp4"], (1, 128), draws=draws)
    for small in (1, -5, 2**31):  # a key is 64 bits, however few it needs
        launch.quantize_payload(x, FORMATS["fp4"], (1, 128), draws=draws._replace(key=small))
    assert len(compiled) == 23 and len(set(compiled)) == 1
