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
from megatron_snip.errors import UsageError


def test_every_part_is_a_module_with_that_flag() -> None:
    assert sum(part.limit_s for part in PARTS) <= 600
    folder = Path(gpu.__file__).parent
    for part in PARTS:
        source = (folder / f"{part.name}.py").read_text()
        flags = [part.flag, *(a for a in (*part.arguments, *part.cpu_arguments) if a[0] == "-")]
        assert all(f'"{flag}"' in source for flag in flags)
    made = command(Part("step", "--json", 1.0, ("--a",), ("--b",)), Path("x.json"), gpu=True)
    assert file_name({"gpu": None, "cpu": "AMD EPYC (9)"}) == "amd-epyc-9.json"
    assert made[1:] == ["-m", "benchmarks.step", "--a", "--json", "x.json"]


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
    found = run_part(part, tmp_path, 100.0, gpu=False)
    assert found.pop("wall_seconds") >= 0 and found == {"failed": "exit status 3"}
    monkeypatch.setattr(subprocess, "run", stand_in(0, None))
    assert run_part(part, tmp_path, 100.0, gpu=False)["failed"] == "it wrote nothing"
    assert run_part(part, tmp_path, 0.0, gpu=False) == {"failed": "no time was left"}

    def slow(arguments: list[str], timeout: float, **_: Any) -> None:
        Path(arguments[-1]).write_text(json.dumps({"results": [1, 2]}))
        raise subprocess.TimeoutExpired("step", timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    found = run_part(part, tmp_path, 7.0, gpu=False)
    assert found["failed"] == "not done after 7 s" and found["results"] == [1, 2]


def test_parts_run_by_name_leave_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = {"name": "fp8 over bf16", "value": 1.1, "least": 1.2, "most": None, "met": False}
    monkeypatch.setattr(subprocess, "run", stand_in(0, {"goals": [goal]}))
    output = tmp_path / "out.json"
    output.write_text(json.dumps({"machine": "old", "step": {"old": 1}, "linear": {"old": 1}}))
    assert gpu.main(["--output", str(output), "--only", "linear,device"]) == 0
    report = json.loads(output.read_text())
    assert list(report) == ["machine", "step", "linear", "device"]
    assert report["step"] == {"old": 1} and "old" not in report["linear"]
    assert report["machine"] != "old"
    assert "missed: fp8 over bf16 1.100 (>= 1.2)" in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", stand_in(1, {}))
    assert gpu.main(["--output", str(output), "--only", "switch"]) == 1
    assert json.loads(output.read_text())["switch"]["failed"] == "exit status 1"
    with pytest.raises(UsageError, match="no part is called 'speed'; known: device, linear, "):
        gpu.main(["--output", str(output), "--only", "linear,speed"])
