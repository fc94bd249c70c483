"""All benchmarks in one go: what fails stays its own, and time runs out in order."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import PARTS, Part, command, file_name, run_part


def test_together_they_fit_into_ten_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 600


def test_every_part_is_a_module_with_that_flag() -> None:
    folder = Path(gpu.__file__).parent
    for part in PARTS:
        source = (folder / f"{part.name}.py").read_text()
        flags = [part.flag, *(a for a in (*part.arguments, *part.cpu_arguments) if a[0] == "-")]
        assert all(f'"{flag}"' in source for flag in flags)
    made = command(Part("step", "--json", 1.0, ("--a",), ("--b",)), Path("x.json"), gpu=True)
    assert made[1:] == ["-m", "benchmarks.step", "--a", "--json", "x.json"]


def test_files_are_called_after_the_machine() -> None:
    assert file_name({"gpu": "NVIDIA H200", "cpu": "AMD"}) == "nvidia-h200.json"
    assert file_name({"gpu": None, "cpu": "AMD EPYC (9)"}) == "amd-epyc-9.json"


def stand_in(status: int, result: dict[str, Any] | None) -> Any:
    def run(arguments: list[str], **_: Any) -> SimpleNamespace:
        if result is not None:
            Path(arguments[-1]).write_text(json.dumps(result))
        return SimpleNamespace(returncode=status)

    return run


def test_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("step", "--json", 10.0)
    monkeypatch.setattr(subprocess, "run", stand_in(0, {"machine": 1, "ratio": 2}))
    found = run_part(part, tmp_path, 100.0, gpu=False)
    assert found["ratio"] == 2 and "machine" not in found and "failed" not in found
    monkeypatch.setattr(subprocess, "run", stand_in(1, {"ratio": 2}))
    assert run_part(part, tmp_path, 100.0, gpu=False)["failed"] == "exit status 1"
    (tmp_path / "step.json").unlink()
    monkeypatch.setattr(subprocess, "run", stand_in(3, None))
    assert run_part(part, tmp_path, 100.0, gpu=False) == {"failed": "exit status 3"}
    assert run_part(part, tmp_path, 0.0, gpu=False) == {"failed": "no time was left"}

    def slow(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("step", timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    assert run_part(part, tmp_path, 7.0, gpu=False) == {"failed": "not done after 7 s"}


def test_one_file_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str], **_: Any) -> SimpleNamespace:
        broken = "benchmarks.switch" in arguments
        if not broken:
            Path(arguments[-1]).write_text("{}")
        return SimpleNamespace(returncode=int(broken))

    monkeypatch.setattr(subprocess, "run", run)
    output = tmp_path / "new" / "out.json"
    assert gpu.main(["--output", str(output)]) == 1
    report = json.loads(output.read_text())
    assert set(report) == {"machine", *(part.name for part in PARTS)}
    assert report["switch"] == {"failed": "exit status 1"}
    assert gpu.main(["--output", str(output), "--only", "linear,step"]) == 0
    assert set(json.loads(output.read_text())) == {"machine", "linear", "step"}
