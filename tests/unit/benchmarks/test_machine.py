"""Rows of results: each has its origin, which the file holds once."""

import json
from pathlib import Path

import pytest

from benchmarks import machine


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
