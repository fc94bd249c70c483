"""`megatron-snip doctor`: versions, devices, formats and the recommended command."""

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.cli import doctor, machine
from megatron_snip.cli.machine import recommended_command
from megatron_snip.formats import FORMATS
from megatron_snip.linears.te.machine import Machine
from megatron_snip.linears.te.recipe_table import RECIPES
from tests.processes import ROOT, run_python

TE = {"te_version": "2.20.2"}


def test_versions_devices_formats_and_the_command_are_printed(
    printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of other packages is printed as it is."""
    hostile = "1.0+[/foo] :smile:"
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": hostile, "transformer-engine": None})
    found = Machine((10, 0), te_version=hostile, te_unavailable={"mxfp8": hostile})
    monkeypatch.setattr(machine, "this_machine", lambda with_te: found)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert "megatron.training is not installed" in printed("doctor")
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    text = printed("doctor")
    for word in ("not installed", "cores", "cuda", "compute capability 10.0", *FORMATS):
        assert word in text
    assert text.count(hostile) >= 2
    assert "functions that SNIP wraps" in text
    for recipe in RECIPES.values():  # what fp8 and fp4 are in a run with each recipe
        assert all(word in text for word in recipe.precision.flags.split())
    assert "the job's own delayed_hybrid recipe" in " ".join(text.replace("|", " ").split())
    assert text.endswith(f"  {recommended_command(found)}\n")
    assert max(len(line) for line in text.splitlines()[:-1]) <= 100


@pytest.mark.parametrize(
    ("found", "implementation"),
    [
        (Machine((9, 0), **TE), "transformer_engine"),
        (Machine((10, 0), **TE), "transformer_engine"),
        (Machine((12, 0), **TE), "transformer_engine"),
        (Machine((8, 0), **TE), "transformer_engine --snip-backend simulate"),
        (Machine((9, 0)), "local"),
        (Machine(), "local"),
    ],
)
def test_the_recommended_command_fits_the_machine(found: Machine, implementation: str) -> None:
    command = recommended_command(found)
    assert command.endswith(f"--transformer-impl {implementation} --snip")
    assert ("--cpu" in command) == (found.capability is None)


def test_an_import_that_ends_the_process_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {
        "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "leaves": "import os; os._exit(3)",
    }
    ends |= {"exits": "raise SystemExit('no licence')", "works": ""}
    for name, text in ends.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "MODULES", {name: name for name in (*ends, "absent")})
    assert doctor.import_errors([*ends, "absent"]) == {
        "crashes": "its import ends the process (SIGKILL)",
        "leaves": "its import ends the process (exit status 3)",
        "exits": "SystemExit: no licence",
        "works": None,
        "absent": "",
    }


BROKEN = {
    "ortools": (1, "SNIP needs ortools: repair or remove what is broken (ortools)"),
    "transformer_engine": (1, "what is broken (megatron-core, transformer-engine)"),
    "wandb": (0, "Recommended on this machine"),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", BROKEN)
def test_a_broken_installation_is_shown_with_its_error(package: str, tmp_path: Path) -> None:
    status, text = BROKEN[package]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise ImportError('libx.so.9: no such file')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python("-m", "megatron_snip", "doctor", PYTHONPATH=path, PYTHONWARNINGS="")
    assert (done.returncode, done.stderr) == (status, "")
    output = " ".join(done.stdout.split())
    assert "cannot be imported: ImportError: libx.so.9: no such file" in output
    assert text in output


def test_a_command_names_the_package_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise OSError('libx.so.9: no such file')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python("-m", "megatron_snip", "plan", "none.json", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr == (
        "megatron-snip: cannot import numpy: OSError: libx.so.9: no such file; "
        "install it again ('megatron-snip doctor' shows what else is broken)\n"
    )


def test_changes_are_listed_with_reason_upstream_and_end(printed: Any) -> None:
    text = printed("doctor", "--changes")
    assert "transformer_engine.pytorch:initialize_ub" in text
    assert "https://github.com/NVIDIA/Megatron-LM/issues/5641" in text
    assert text.count("\n  goes ") == text.count("\n  why ") > 20
