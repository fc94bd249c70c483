"""`megatron-snip doctor`: versions, devices, formats, seams."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.__main__ import main
from megatron_snip.cli.doctor import seam_states, support
from megatron_snip.formats import FORMATS
from tests.unit.patches.fake_megatron import FakeMegatron


def test_everything_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("megatron-core", "torch", "transformer-engine", "cores", "cuda", *FORMATS):
        assert word in text
    assert "train-step" not in text


def test_formats_say_how_and_why() -> None:
    assert support(FORMATS["bf16"]).how == "native"
    for name in ("fp8", "fp4", "nvfp4"):
        found = support(FORMATS[name])
        assert found.how == "simulated"
        assert ("triton" if torch.cuda.is_available() else "reference") in found.reason


def test_seams_without_megatron_training_are_unusable(capsys: pytest.CaptureFixture[str]) -> None:
    """megatron-core 0.16.1's wheel has megatron.core alone."""
    pytest.importorskip("megatron.core")
    if any(s.state.word == "ready" for s in seam_states() if s.name == "train-step"):
        pytest.skip("megatron.training is installed")
    assert main(["doctor", "--patches"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "unusable" in text and "comes with a Megatron-LM checkout" in text


def test_seams_with_megatron_training_are_ready(
    fake: FakeMegatron, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--patches"]) == 0
    text = "".join(capsys.readouterr().out.split())
    for state in seam_states():
        assert state.target in text
        assert state.state.word == ("not needed" if state.when == "--cpu" else "ready")
