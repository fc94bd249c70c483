"""Which Python measures the GPU, and what it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start
from benchmarks.start import Found, candidates, choose, pins


def python_that_says(folder: Path, name: str, told: dict[str, Any] | str) -> str:
    """A stand-in for an interpreter: whatever it is asked, it prints this."""
    path = folder / name
    text = told if isinstance(told, str) else json.dumps(told)
    path.write_text(f"#!/bin/sh\ncat <<'END'\na warning first\n{text}\nEND\n")
    path.chmod(0o755)
    return str(path)


H200 = {"torch": "2.11.0+cu130", "cuda": "13.0", "gpu": "NVIDIA H200", "missing": []}


def test_the_first_that_sees_the_gpu_is_taken_and_the_others_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    laptop = {"torch": "2.13.0+cpu", "cuda": None, "missing": [], "headers": True}
    driver = {"torch": "2.15", "cuda": "13.2", "why": "RuntimeError: driver too old"}
    asked = [
        python_that_says(tmp_path, "cpu", laptop),
        python_that_says(tmp_path, "driver", {**driver, "missing": [], "headers": True}),
        python_that_says(tmp_path, "broken", "no answer"),
        str(tmp_path / "absent"),
        python_that_says(tmp_path, "image", {**H200, "missing": ["yaml"], "headers": False}),
    ]
    found = choose(asked)
    assert found == Found(asked[-1], "NVIDIA H200", "", ("yaml",), False)
    told = capsys.readouterr().out
    assert "torch 2.13.0+cpu is built without CUDA" in told and "driver too old" in told
    assert told.count("it does not run") == 2
    assert choose(asked[:2]) is None
    assert candidates({"BENCH_PYTHON": "/opt/python"}) == ["/opt/python"]
    assert candidates({})[-1] == sys.executable


def test_everything_needed_is_pinned() -> None:
    text = start.PINS.read_text()
    wanted = pins(start.NEEDED, text)
    assert len(wanted) == sum(map(len, start.NEEDED.values()))
    assert all(f"\n{pin} \\\n" in text for pin in wanted)
    assert pins(["megatron.core"], "# a==1\nMegatron_Core==9\n") == ["Megatron_Core==9"]


def run_main(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, found: Found | None, status: int = 0
) -> tuple[int, list[list[str]]]:
    """Run `main` with stand-ins; return its status and the commands it gave."""
    given: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        given.append(words)
        return subprocess.CompletedProcess(words, status)

    real = Path.exists
    monkeypatch.delenv("BENCH_PYTHON", raising=False)
    monkeypatch.setattr(
        Path, "exists", lambda self: gpu if str(self) == "/dev/nvidiactl" else real(self)
    )
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(start, "choose", lambda _: found)
    return start.main(["--only", "linear"]), given


def test_what_is_missing_is_installed_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found("/opt/python", "NVIDIA H200", missing=("pydantic", "megatron.core"))
    status, given = run_main(monkeypatch, gpu=True, found=found)
    assert status == 0 and len(given) == 2
    assert given[0][0] == "/opt/python" and str(start.BESIDE) in given[0]
    assert any(word.startswith("megatron-core==") for word in given[0])
    assert given[1][-4:] == ["-m", "benchmarks.gpu", "--only", "linear"]
    assert str(start.BESIDE) in start.environment()["PYTHONPATH"].split(os.pathsep)
