"""All benchmarks in one go, what fails stays its own, and the rows that they write."""

import importlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu, machine, suites
from benchmarks.gpu import FIRST, PARTS, Part, command, file_name, next_part, run_part
from benchmarks.machine import append_row
from benchmarks.start import BROUGHT, PINS, requirements


def test_every_part_is_a_module_with_that_flag() -> None:
    assert all(part.limit_s <= 480 for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)
    folder = Path(gpu.__file__).parent
    for part in PARTS:
        source = (folder / f"{part.module or part.name}.py").read_text()
        flags = [part.flag, *(a for a in (*part.arguments, *part.cpu_arguments) if a[0] == "-")]
        assert all(f'"{flag}"' in source for flag in flags)
    made = command(Part("step", "--json", 1.0, ("--a",), ("--b",)), Path("x.json"), gpu=True)
    assert file_name({"gpu": None, "cpu": "AMD EPYC (9)"}) == "amd-epyc-9.json"
    assert made[1:] == ["-m", "benchmarks.step", "--a", "--json", "x.json"]


@pytest.mark.parametrize(
    ("status", "written", "found"),
    [
        (0, {"machine": 1, "ratio": 2}, {"ratio": 2}),
        (1, {"ratio": 2}, {"ratio": 2, "failed": "exit status 1"}),
        (3, None, {"failed": "exit status 3"}),
        (0, None, {"failed": "it wrote nothing"}),
        (None, {"results": [1, 2]}, {"results": [1, 2], "failed": "not done after 7 s"}),
    ],
)
def test_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, written: Any, found: Any
) -> None:
    def run(arguments: list[str], timeout: float, **_: Any) -> SimpleNamespace:
        if written is not None:
            Path(arguments[-1]).write_text(json.dumps(written))
        if status is None:
            raise subprocess.TimeoutExpired("step", timeout)
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    outcome = run_part(Part("step", "--json", 10.0), tmp_path, 7.0, gpu=False)
    assert outcome.pop("wall_seconds") >= 0 and outcome == found


def test_a_refresh_writes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str], **_: Any) -> SimpleNamespace:
        append_row(Path(arguments[-1]), {"ratio": 1.5})
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    part = next(part for part in PARTS if part.name == "refresh")
    found = run_part(part, tmp_path, 100.0, gpu=False)
    assert found["ratio"] == 1.5 and "command" in found and "failed" not in found


def test_a_slice_goes_on_where_the_last_one_stopped(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[str] = []

    def run(part: Part, folder: Path, left: float, on_gpu: bool) -> dict[str, Any]:
        calls.append(part.name)
        if part.name == "curves":
            return {"unfinished": True} if calls.count("curves") == 1 else {"losses": []}
        return {"failed": "exit status 1"} if part.name == "step" else {"ratio": 1}

    monkeypatch.setattr(gpu, "run_part", run)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    clock = iter([0.0, 0.0, 0.0, 0.0, 400.0])  # a slice ends before a part that may not fit
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock, 400.0))
    words = ["--output", str(tmp_path / "x.json")]
    assert gpu.main([*words, "--only", "device,linear,step,curves"]) == 3
    assert calls == ["device", "linear", "step"]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 0.0)
    assert gpu.main([*words, "--only", "device,linear,step,curves"]) == 1  # step had failed
    assert calls[3:] == ["curves", "curves"]
    assert gpu.main([*words, "--only", "device"]) == 0 and len(calls) == 5
    assert gpu.main([*words, "--only", "device", "--again"]) == 0 and calls[5:] == ["device"]
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["linear"]["ratio"] == 1 and found["step"]["failed"]
    assert next_part(PARTS, {}, "a") is PARTS[0]


def test_the_first_minutes_are_twelve_and_no_part_takes_more_than_two() -> None:
    assert all(part.limit_s <= 120 for part in FIRST)
    assert sum(part.limit_s for part in FIRST) <= 12 * 60
    assert PARTS[: len(FIRST)] == FIRST
    assert [part.name for part in FIRST][:2] == ["bits", "measured"]


@pytest.mark.parametrize("part", [part for part in FIRST if part.module in ("suites", "layers")])
def test_parts_that_need_a_gpu_say_so_without_one(part: Part, tmp_path: Path) -> None:
    module = importlib.import_module(f"benchmarks.{part.module}")
    if machine.has_gpu():
        pytest.skip("here is one")
    file = tmp_path / "found.json"
    assert module.main([*part.cpu_arguments, part.flag, str(file)]) == 0
    assert "GPU" in json.loads(file.read_text())["skipped"]


def test_a_suite_counts_what_ran_and_names_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "test_x.py"
    tests.write_text(
        "import os, pytest\n"
        "def test_a(record_property): record_property('ms', 2.5); assert os.environ['ASKED']\n"
        "def test_b(): pytest.skip('no')\n"
        "def test_c(): assert False\n"
    )
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    found = suites.run(suites.Suite((str(tests),), {"ASKED": "1"}))
    assert found == {
        "tests": 2,
        "skips": 1,
        "measured": {"ms": 2.5},
        "failures": {"test_c": "see above"},
    }


def test_what_is_brought_is_pinned_by_hashes() -> None:
    text = requirements(PINS.read_text())
    assert text.count("==") == len(BROUGHT) and text.count("--hash=") >= len(BROUGHT)


def test_rows_have_the_origin_above_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    assert machine.read_rows(path) == []
    written = [machine.append_row(path, {"k": k}) for k in range(2)]
    monkeypatch.setattr(machine, "_commit", lambda: "another")
    written.append(machine.append_row(path, {"k": 2}))
    assert machine.read_rows(path) == written
    assert [row["k"] for row in written] == [0, 1, 2] and written[2]["commit"] == "another"
    kinds = ["command" in json.loads(line) for line in path.read_text().splitlines()]
    assert kinds == [True, False, False, True, False]
