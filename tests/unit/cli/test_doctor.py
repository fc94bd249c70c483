"""`megatron-snip doctor`: versions, devices, formats, seams."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_snip.__main__ import main
from megatron_snip.cli import doctor
from megatron_snip.formats import FORMATS
from megatron_snip.linears import availability
from megatron_snip.linears.availability import Machine
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
    monkeypatch.setattr(availability, "this_machine", lambda with_te: machine)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.count(hostile) >= 2


def test_this_machine_s_table_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed() -> str:
        assert main(["doctor"]) == 0
        return " ".join(capsys.readouterr().out.split())

    text = printed()
    if not torch.cuda.is_available():
        assert "How GEMMs run here (no GPU)" in text and "simulate quantizes by reference" in text
        assert "fp8 8 simulated refused FP8 GEMMs in blocks need a GPU" in text
    hopper = Machine((9, 0), "2.20.2", te_unavailable={"blockwise": "CUDA 12.9 is needed"})
    monkeypatch.setattr(availability, "this_machine", lambda with_te: hopper)
    text = printed()
    assert "How GEMMs run here (compute capability 9.0)" in text
    assert "fp8 8 simulated refused CUDA 12.9 is needed" in text
    assert "bf16 16 native native as Megatron runs it" in text


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
