"""Every kernel compiles for Hopper and Blackwell without a GPU, and no register spills.

Kernels are launched on CPU tensors against a driver that only compiles, so what is checked is what
training launches. A spilled register travels through memory, whose bandwidth these kernels need.
"""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("compiling needs Triton without its interpreter", allow_module_level=True)

from benchmarks.static import (
    KEY,
    RANDOM,
    ROW,
    VARIANTS,
    compiled,
    compiling,
    executed,
    one,
    resources,
    table,
)
from megatron_snip.kernels import launch
from megatron_snip.quantizers.quantize import philox_arguments
from megatron_snip.quantizers.stochastic import StochasticStream

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_everything_compiles_without_spills(arch, capsys):
    rows = table(arch)
    with capsys.disabled():
        print(
            f"\nsm_{arch}:", {row["name"]: (row["registers"], row["instructions"]) for row in rows}
        )
    assert {row["name"] for row in rows} == set(VARIANTS)
    assert not any(row["spilled"] for row in rows)


def test_enough_programs_fit_to_hide_latency():
    """Registers leave room for at least 512 threads on a multiprocessor (of 65536 registers)."""
    for name in ("fp8 128x128", "fp4 128x1 stochastic"):
        kernel = compiled(name, 90).kernel
        registers, spilled = resources(kernel, 90)
        threads = kernel.metadata.num_warps * 32
        assert 65536 // (registers * threads) * threads >= 512 and spilled == 0


def test_a_loop_counts_as_often_as_it_loads_and_a_slow_division_not_at_all():
    code = """
        /*0000*/ MOV R1, R2 ;
.L_x_0:
        /*0010*/ LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/ @!P1 BRA `(.L_x_1) ;
        /*0030*/ CALL.REL.NOINC `(slow) ;
.L_x_1:
        /*0040*/ @P0 BRA `(.L_x_0) ;
        /*0050*/ @!P0 EXIT ;
        /*0060*/ EXIT ;
        /*0070*/ BRA `(.L_x_1) ;
"""
    assert executed(code, 16) == 6 and executed(code, 64) == 6 + 3 * 3


def test_the_quotient_is_rounded_before_it_is_rounded_to_the_grid():
    """Fused into one operation, x * encode + anchor would round once, and ties otherwise."""
    lines = compiled("fp8 1x128", 90).kernel.asm["ptx"].splitlines()
    fused = [line for line in lines if "fma.rn.f32" in line]
    anchors = "0f49C00000", "0fC9C00000"  # 1.5 * 2^20, either sign
    divisors = "0fC3E00000", "0f3B124925"  # -448, 1 / 448: of scales
    config = launch.ROW_CONFIG
    rounding = [line for line in fused if any(anchor in line for anchor in anchors)]
    assert len(rounding) == 2 * config.rows * config.cols // (32 * config.num_warps)
    others = set(fused) - set(rounding)
    assert all(any(divisor in line for divisor in divisors) for line in others)


def test_new_steps_and_streams_do_not_recompile():
    """Training launches with a new key every step; a compilation each time would stall it."""
    x = torch.randn(64, 256).bfloat16()
    with compiling(90) as kernels:
        for step in range(5):
            stream = StochasticStream(replace(KEY, iteration=step))
            one("fp4", ROW, random=philox_arguments(stream, 256))(x)
        for small in (1, -5, 2**31):  # a key is 64 bits, however few it needs
            one("fp4", ROW, random=RANDOM._replace(key=small, columns=(256, 256, 256, 0)))(x)
    hashes = [found.kernel.hash for found in kernels]
    assert len(hashes) == 8 and len(set(hashes[:5])) == 1 and len(set(hashes[5:])) == 1
