"""`megatron-snip doctor`: versions, devices, formats, seams."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_snip.__main__ import main
from megatron_snip.cli import doctor
from megatron_snip.cli.doctor import how, reasons
from megatron_snip.formats import FORMATS
from megatron_snip.kernels import dispatch
from megatron_snip.linears import te_support
from megatron_snip.linears.backends import Backend, Machine, rows
from megatron_snip.patches.install import PATCHES
from tests.unit.patches.fake_megatron import FakeMegatron


def test_everything_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("megatron-core", "torch", "transformer-engine", "cores", "cuda", *FORMATS):
        assert word in text
    assert "train-step" not in text


def test_what_others_say_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions and reasons come from other packages."""
    hostile = "1.0+[/foo] :smile:"
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": hostile})
    machine = Machine((10, 0), te_version=hostile, te_unavailable={"mxfp8": hostile})
    monkeypatch.setattr(te_support, "this_machine", lambda with_te: machine)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.count(hostile) >= 2


@pytest.mark.parametrize(
    ("capability", "where"),
    [((8, 0), "8.0"), ((8, 9), "8.9"), ((9, 0), "9.0"), ((10, 0), "10.x"), ((12, 0), "12.x")],
)
def test_formats_run_as_the_table_says(capability: tuple[int, int], where: str) -> None:
    machine = Machine(capability, te_version="2.20.2", te_per_gemm=True)
    for backend in Backend:
        told = {fmt: why for why, each in reasons(backend, machine).items() for fmt in each}
        for name, gemms, cells in rows(backend):
            cell = cells[where]
            assert str(cell.how) in how(backend, name, machine)
            if name == "bf16":
                continue
            which = name if len(gemms) == 3 else f"{name} ({', '.join(gemms)})"
            same = name if name in told else which
            assert told[same] == f"{cell.how}: {cell.why}"


def test_this_machine_s_transformer_engine_has_its_say() -> None:
    without = Machine((10, 0))
    assert how(Backend.TE, "nvfp4", without) == "refused"
    assert "refused: Transformer Engine cannot be imported" in reasons(Backend.TE, without)
    assert how(Backend.TE, "bf16", without) == "native"
    old = Machine((9, 0), te_version="2.8", te_unavailable={"blockwise": "CUDA 12.9 is needed"})
    assert reasons(Backend.TE, old)["refused: CUDA 12.9 is needed"] == [
        "fp8",
        "fp8_pow2",
    ]
    new = Machine((9, 0), te_version="2.20.2")
    assert how(Backend.TE, "fp8", new) == "approximated"
    assert how(Backend.TE, "fp8_pow2", new) == "native"


def test_the_machine_s_own_row_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    if not torch.cuda.is_available():
        assert "How GEMMs run on this machine" in text
        assert "needs a GPU of compute capability 8.0 to 12.1" in text
    assert f"simulate quantizes by {dispatch.explain().path}" in text
    monkeypatch.setattr(te_support, "this_machine", lambda with_te: Machine((9, 0), "2.20.2"))
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "How GEMMs run on Hopper (9.0)" in text and "NVFP4 GEMMs need 10.0" in text


def test_patches_without_megatron_training_are_unusable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """megatron-core 0.16.1's wheel has megatron.core alone."""
    if importlib.util.find_spec("megatron.training") is not None:
        pytest.skip("megatron.training is installed")
    assert main(["doctor", "--patches"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "unusable" in text and "in a Megatron-LM checkout" in text


def test_patches_with_megatron_training_are_ready(
    fake: FakeMegatron, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--patches"]) == 0
    text = capsys.readouterr().out
    assert all(patch.target in text for patch in PATCHES)
    assert "not needed" in text and "unusable" not in text
