"""Results say where they come from."""

from __future__ import annotations

import datetime
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_snip.reporting import provenance


def test_the_machine_is_named() -> None:
    found = provenance.machine()
    assert found["date"] == datetime.date.today().isoformat()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["versions"]["torch"]


def test_the_commit_is_the_checkouts_and_marked_when_it_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=n", "-c", "user.email=n@n"]
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "module.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() is None
    (tmp_path / "module.py").write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = provenance.commit()
    assert clean is not None
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (tmp_path / "module.py").write_text("two")
    assert provenance.commit() == f"{clean}-dirty"


def test_a_package_installed_inside_of_another_checkout_has_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["-c", "user.name=n", "-c", "user.email=n@n"]
    for words in (["init", "-q"], [*names, "commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    installed = tmp_path / "venv" / "module.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.commit() is None


def test_a_gpu_hidden_from_the_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> str:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(provenance, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", hidden)
    assert provenance.machine()["gpu"] is None


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert provenance.commit() is None
