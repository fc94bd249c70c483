"""A result names the machine that it comes from."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch

from benchmarks import machine


def test_a_result_has_its_machine(tmp_path: Path) -> None:
    machine.write_result(tmp_path / "results" / "r.json", {"seconds": 1.0})
    result = json.loads((tmp_path / "results" / "r.json").read_text())
    found = result["machine"]
    assert result["seconds"] == 1.0 and found["date"] == datetime.date.today().isoformat()
    assert found["cpu"] and found["cores"] >= 1 and found["versions"]["torch"]


def test_rows_are_appended_with_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.jsonl"
    machine.append_row(file, {"ratio": 1.5})
    last = machine.append_row(file, {"ratio": 1.6})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["ratio"] for row in rows] == [1.5, 1.6] and rows[1] == last
    assert {"command", "commit", "date", "cpu", "cores", "torch"} <= set(last)


def test_a_gpu_hidden_from_the_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> str:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", hidden)
    assert machine.machine()["gpu"] is None
