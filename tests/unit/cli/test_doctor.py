"""`megatron-snip doctor`: versions, devices, formats and the recommended command."""

from typing import Any

import pytest

from megatron_snip.cli import doctor
from megatron_snip.cli.doctor import recommended_command
from megatron_snip.formats import FORMATS
from megatron_snip.linears.te.machine import Machine

TE = {"te_version": "2.20.2"}


def test_versions_devices_formats_and_the_command_are_printed(
    printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of other packages is printed as it is."""
    hostile = "1.0+[/foo] :smile:"
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": hostile, "transformer-engine": None})
    machine = Machine((10, 0), te_version=hostile, te_unavailable={"mxfp8": hostile})
    monkeypatch.setattr(doctor, "this_machine", lambda with_te: machine)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert "megatron.training is not installed" in printed("doctor")
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    text = printed("doctor")
    for word in ("not installed", "cores", "cuda", "compute capability 10.0", *FORMATS):
        assert word in text
    assert text.count(hostile) >= 2
    assert "functions that SNIP wraps" in text
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
