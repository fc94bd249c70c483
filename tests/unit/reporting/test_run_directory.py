"""A run's files: their names, their content, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, read_plan
from megatron_snip.reporting.run_directory import PACKAGES, RunDirectory, versions


def plan(step: int = 20) -> PrecisionPlan:
    linears = {"decoder.layers.0.mlp.linear_fc2": Option("fp4", "fp8", "fp8")}
    return PrecisionPlan(
        iteration=step,
        policy="snip",
        status="optimal",
        objective=0.5,
        bound=0.5,
        seconds=0.25,
        target=0.3,
        efficiency=1 / 3,
        stages=(1 / 3,),
        linears=linears,
        digest=assignment_digest(linears),
    )


def lines(directory: RunDirectory) -> list[dict[str, float | None]]:
    text = (directory.path / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_the_files_are_those_of_the_contract(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "one")  # parents are made
    run.start({"num_layers": 4, "snip": {"formats": ["fp8", "fp4"]}})
    run.metrics({"step": 0, "loss": 5.0})
    assert run.problem(20, {"version": 1}) == run.path / "problems" / "20.json"
    assert run.divergences(20, {"version": 1}) == run.path / "divergences" / "20.json"
    assert run.plan(plan()) == run.path / "plans" / "20.json"
    run.close()
    found = {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()}
    assert found == {
        *("config.yaml", "versions.json", "metrics.jsonl"),
        *("problems/20.json", "divergences/20.json", "plans/20.json"),
    }
    assert yaml.safe_load((run.path / "config.yaml").read_text())["num_layers"] == 4
    assert json.loads((run.path / "problems" / "20.json").read_text()) == {"version": 1}


def test_a_plan_file_holds_exactly_the_keys_of_the_schema(tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).plan(plan())
    stored = json.loads(path.read_text())
    assert list(stored) == [
        *("version", "step", "policy", "status", "objective", "bound", "seconds", "target"),
        *("efficiency", "stages", "linears", "digest"),
    ]
    assert stored["linears"] == {
        "decoder.layers.0.mlp.linear_fc2": {"fprop": "fp4", "dgrad": "fp8", "wgrad": "fp8"}
    }
    assert read_plan(path) == plan()


def test_versions_say_what_decides_numbers() -> None:
    found = versions()
    assert set(found) == {"python", *PACKAGES}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] is not None


def test_metrics_are_lines_and_nothing_is_not_json(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics({"step": 0, "loss": math.nan, "grad_norm": math.inf, "lr": 1e-3})
    run.metrics({"step": 1, "loss": 2.0})
    run.close()
    assert lines(run) == [
        {"step": 0, "loss": None, "grad_norm": None, "lr": 1e-3},
        {"step": 1, "loss": 2.0},
    ]
    again = RunDirectory(tmp_path)  # a resumed run goes on
    again.metrics({"step": 2})
    again.close()
    assert [line["step"] for line in lines(again)] == [0, 1, 2]
    again.close()  # twice is fine


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    script = (
        "import os; from pathlib import Path\n"
        "from megatron_snip.reporting.run_directory import RunDirectory\n"
        f"run = RunDirectory(Path({str(tmp_path)!r}))\n"
        "for step in range(300):\n"
        "    run.metrics({'step': step, 'text': 'x' * 101})\n"
        "os._exit(9)\n"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert done.returncode == 9
    assert [line["step"] for line in lines(RunDirectory(tmp_path))] == list(range(300))


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.problem(5, {"old": 1})
    with pytest.raises(ValueError):
        run.problem(5, {"new": math.nan})  # no JSON
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        run.problem(5, {"new": 2})
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "problems").iterdir()] == ["5.json"]
    assert json.loads((tmp_path / "problems" / "5.json").read_text()) == {"old": 1}


def fail(*_: object) -> None:
    raise OSError("no space left")
