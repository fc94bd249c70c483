"""A whole comparison with the real trainer: two contenders, once, and never twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.__main__ import main
from tests.unit.comparison.build import TRAIN

FORMATS = ("fp8", "fp3")


def test_a_comparison_trains_once_and_makes_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, output = tmp_path / "compare.yaml", tmp_path / "out"
    settings = {
        "output": str(output),
        "train": {**TRAIN, "data_cache_path": str(tmp_path / "data")},
        "forks": {"base_steps": 3, "steps": 2},
        "lowest": ["fp3"],
        "targets": [0.5],
        "seeds": 1,
        "policies": ["bf16", "snip-gemm"],
    }
    config.write_text(json.dumps(settings))
    command = ["compare", "--config", str(config)]
    assert main(command) == 0, capsys.readouterr().out
    assert "[4/4]" in capsys.readouterr().out

    (table,) = json.loads((output / "comparison.json").read_text())["tables"]
    bf16, snip = table["rows"]
    assert (bf16["contender"], snip["contender"]) == ("bf16", "snip-gemm")
    assert bf16["lowest_fraction"] == 0.0
    assert 0.5 - 1e-9 <= snip["lowest_fraction"] < 0.7
    assert snip["step_time"]["Blackwell"] < snip["step_time"]["Hopper"] < 1.0
    # The precision differs and nothing else: the losses of the first step are close, not equal.
    first = {row: losses(output, row)[0] for row in ("bf16", "snip-gemm")}
    assert 0.0 < abs(first["bf16"] - first["snip-gemm"]) < 0.1
    assert len(losses(output, "bf16")) == 2
    assert (output / "forks-fp3-50.png").read_bytes().startswith(b"\x89PNG")

    outcome = outcome_of(output, "snip-gemm")
    assert len(outcome["options"]) == 4 * TRAIN["num_layers"]
    assert all(sum(each.values()) == pytest.approx(1.0) for each in outcome["options"].values())
    assert "What each policy protects" in (output / "report" / "report.html").read_text()

    seconds = tmp_path / "seconds.json"
    gemms = {"fprop": 1.0, "dgrad": 1.0, "wgrad": 1.0}
    linear = {"names": "*", "out_features": 8, "in_features": 8}
    linear["seconds"] = {"bf16": gemms, **{name: {**gemms, "dgrad": 3.0} for name in FORMATS}}
    table = {"version": 1, "machine": "m", "device": "a chip", "date": "d", "versions": {}}
    seconds.write_text(json.dumps({**table, "tokens": 8, "linears": [linear]}))
    written = {path: path.stat().st_mtime_ns for path in (output / "runs").rglob("metrics.jsonl")}
    assert len(written) == 4
    assert main([*command, "--calibration", str(seconds)]) == 0
    (table,) = json.loads((output / "comparison.json").read_text())["tables"]
    bf16, snip = table["rows"]
    assert bf16["step_time"]["a chip"] == pytest.approx(1.0)
    assert 1.0 < snip["step_time"]["a chip"] < 5 / 3  # linears take 5 seconds instead of 3
    assert "[" not in capsys.readouterr().out.split("forks,")[0], "no run is made again"
    assert written == {path: path.stat().st_mtime_ns for path in written}


def losses(output: Path, contender: str) -> list[float]:
    """Training losses of the one run of a contender."""
    found: list[float] = outcome_of(output, contender)["losses"]
    return found


def outcome_of(output: Path, contender: str) -> dict[str, Any]:
    """What is kept of the one run of a contender."""
    (path,) = (output / "outcomes").glob(f"*{contender}-s0-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found
