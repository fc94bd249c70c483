"""A whole comparison with the real trainer: two contenders, once, and never twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from tests.unit.comparison.build import TRAIN


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

    written = {path: path.stat().st_mtime_ns for path in (output / "runs").rglob("metrics.jsonl")}
    assert len(written) == 4
    assert main(command) == 0
    assert "[" not in capsys.readouterr().out.split("forks,")[0], "no run is made again"
    assert written == {path: path.stat().st_mtime_ns for path in written}


def losses(output: Path, contender: str) -> list[float]:
    """Training losses of the one run of a contender."""
    (path,) = (output / "outcomes").glob(f"*{contender}-s0-*.json")
    found: list[float] = json.loads(path.read_text())["losses"]
    return found
