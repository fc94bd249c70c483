"""Every kernel compiles for Hopper and Blackwell without a GPU, and no register spills."""

import os

import pytest

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("compiling needs Triton without its interpreter", allow_module_level=True)

from megatron_snip.kernels.compilation import compile_variant, main, variants

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
