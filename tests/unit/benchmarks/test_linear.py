"""The linear's benchmark, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import linear


def test_every_case_is_measured() -> None:
    result = linear.measure((256, 128, 384), torch.device("cpu"), rounds=1)
    cases = {"bf16", "fp8 simulate", "fp8 simulate, W cached", "fp4 simulate"}
    assert set(result["seconds"]) == set(result["speedup_over_bf16"]) == cases
    assert result["speedup_over_bf16"]["bf16"] == 1.0 and result["failures"] == {}
    assert set(result["saved_bytes"].values()) == {2 * 256 * 128}
    assert json.loads(json.dumps(result)) == result
    results = [
        {"shape": [size] * 3, "speedup_over_bf16": {"fp8 simulate": 0.8}} for size in (64, 8192)
    ]
    (goal,) = linear.goals(results)
    assert (goal["value"], goal["met"]) == (1.25, False)


def test_results_are_written_after_every_shape_and_failures_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "linear.json", []

    def measure(shape: Any, *_: Any) -> dict[str, Any]:
        seen.append(json.loads(file.read_text())["results"] if seen else [])
        failures = {"fp8 simulate": "RuntimeError: no"} if len(seen) == 2 else {}
        return {
            "shape": list(shape),
            "seconds": {},
            "host_seconds": {},
            "saved_bytes": {},
            "failures": failures,
        }

    monkeypatch.setattr(linear, "measure", measure)
    monkeypatch.setattr(linear, "has_gpu", lambda: False)
    monkeypatch.setattr(linear.cpu, "install", lambda: True)
    assert linear.main(["--json", str(file)]) == 1
    assert [len(results) for results in seen] == [0, 1, 2]
    assert len(json.loads(file.read_text())["results"]) == 3
