"""The first benchmark on a GPU, run on the CPU against itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import device
from benchmarks.kernel_cases import Case


def test_the_cpu_agrees_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "device.json"
    monkeypatch.setattr(device, "ceilings", lambda _: {"bf16_tflops": 1.0})
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    monkeypatch.setattr(device, "show", lambda *_: None)
    assert device.main(["--json", str(file)]) == 0
    report = json.loads(file.read_text())
    names = [check["name"] for check in report["checks"]]
    assert names[-2:] == ["error norms", "a linear waits for the GPU"]
    assert report["failures"] == {}


def test_differences_and_failures_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.device) -> float:
        raise RuntimeError("an illegal\nmemory access")

    runs = iter((0.0, 1.0))
    case = Case("changing", lambda x: x + next(runs), 4)
    checks = {"right": (lambda _: 0.5, 1.0), "nan": (lambda _: float("nan"), 1.0)}
    checks |= {"wrong": (device._bits(case, (8, 8)), 0.0), "dead": (broken, 1.0)}
    monkeypatch.setattr(device, "checks", lambda: checks)
    monkeypatch.setattr(device, "ceilings", broken)
    report = device.run(torch.device("cpu"))
    assert [(check["name"], check["met"]) for check in report["checks"]] == [
        ("right", True),
        ("nan", False),
        ("wrong", False),
    ]
    assert report["failures"]["dead"] == "RuntimeError: an illegal memory access"
    assert set(report["failures"]) == {"ceilings", "dead"}
