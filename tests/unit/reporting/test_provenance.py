"""Results say where they come from."""

from __future__ import annotations

import datetime
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

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


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert provenance.commit() is None
