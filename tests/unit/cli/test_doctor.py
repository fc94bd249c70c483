"""`megatron-snip doctor`: versions, devices, formats, patches, and the recommended command."""

from __future__ import annotations

import importlib.util

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli import doctor
from megatron_snip.cli.doctor import recommended_command
from megatron_snip.formats import FORMATS
from megatron_snip.linears import availability
from megatron_snip.linears.availability import Machine
from megatron_snip.patches.install import PATCHES
from tests.unit.patches.fake_megatron import FakeMegatron

TE = {"te_version": "2.20.2"}


def test_versions_devices_formats_and_the_command_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of other packages is printed as it is."""
    hostile = "1.0+[/foo] :smile:"
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": hostile, "transformer-engine": None})
    machine = Machine((10, 0), te_version=hostile, te_unavailable={"mxfp8": hostile})
    monkeypatch.setattr(availability, "this_machine", lambda with_te: machine)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("not installed", "cores", "cuda", "compute capability 10.0", *FORMATS):
        assert word in text
    assert text.count(hostile) >= 2 and "train-step" not in text
    assert text.endswith(f"  {recommended_command(machine)}\n")
    assert max(len(line) for line in text.splitlines()[:-1]) <= 100


@pytest.mark.parametrize(
    ("machine", "implementation"),
    [
        (Machine((9, 0), **TE), "transformer_engine"),
        (Machine((10, 0), **TE), "transformer_engine"),
        (Machine((12, 0), **TE), "transformer_engine --snip-backend simulate"),
        (Machine((9, 0)), "local"),
        (Machine(), "local"),
    ],
)
def test_the_recommended_command_fits_the_machine(machine: Machine, implementation: str) -> None:
    command = recommended_command(machine)
    assert command.endswith(f"--transformer-impl {implementation} --snip")
    assert ("--cpu" in command) == (machine.capability is None)


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
    text = "".join(capsys.readouterr().out.split())
    assert all(patch.target in text for patch in PATCHES)
    assert "notneeded" in text and "unusable" not in text
