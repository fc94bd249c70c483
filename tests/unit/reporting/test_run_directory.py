"""A run's files: their names and contents, complete or absent; writers that fail."""

import json
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_snip.directory import MARKER, mark
from megatron_snip.errors import UsageError
from megatron_snip.planning.plan import read_plan
from megatron_snip.planning.problem import read_problem
from megatron_snip.reporting.events import Event, Metrics, Notice, Reporter
from megatron_snip.reporting.run_directory import OldRun, RunDirectory, open_run
from tests.processes import run_python
from tests.unit.reporting.runs import Shape, applied, config, measurement_at, plan_from

SHAPE = Shape(config(), backend="simulate")
MEASURED = measurement_at(SHAPE, 30)
PLAN = plan_from(SHAPE, MEASURED)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_every_event_is_in_its_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "one")  # parents are made
    run.start({"num_layers": 4, "snip": {"formats": ["fp8", "fp4"]}})
    for payload in (
        applied(SHAPE, PLAN),
        MEASURED,
        Notice("refresh_failed", "why"),
        Metrics({"loss": 2.0}),
    ):
        run.write(Event(34, payload))
    run.write(Event(35, Metrics({"loss": math.nan, "grad_norm": math.inf})))
    run.close()
    run.close()  # twice is no error
    found = {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()}
    assert found == {
        *("config.yaml", "versions.json", "metrics.jsonl", "precision/34.json"),
        *("problems/34.json", "divergences/34.json", "health/34.json", "plans/30.json"),
    }
    assert yaml.safe_load((run.path / "config.yaml").read_text())["num_layers"] == 4
    assert read_plan(run.path / "plans" / "30.json") == PLAN
    assert read_problem(run.path / "problems" / "34.json").target == 0.6
    first, second = rows(run.path)
    assert first.pop("wall_s") >= 0 and second.pop("wall_s") >= 0
    assert first == {
        "iteration": 34,
        "loss": 2.0,
        "plan_iteration": 30,
        "changed_linears": 12,
        "predicted_saving_s": 0.007,
        "wait_s": 0.002,
        "refresh_s": 0.25,
        "notices": [{"kind": "refresh_failed", "message": "why"}],
    }
    assert second == {"iteration": 35, "loss": None, "grad_norm": None}


def test_a_resumed_run_appends_and_writes_its_plan_only_where_it_is_missing(tmp_path: Path) -> None:
    resumed = applied(SHAPE, PLAN, num_changed=0, resumed=True)
    first = RunDirectory(tmp_path / "same")
    first.write(Event(39, applied(SHAPE, PLAN)))
    first.write(Event(39, Metrics({})))
    first.close()
    for folder, plans in (("same", [30, None]), ("other", [30])):
        again = RunDirectory(tmp_path / folder)
        again.write(Event(40, resumed))
        again.write(Event(40, Metrics({})))
        again.close()
        assert [row.get("plan_iteration") for row in rows(tmp_path / folder)] == plans
        assert read_plan(tmp_path / folder / "plans" / "30.json") == PLAN


@pytest.mark.parametrize(
    ("old_run", "left"),
    [
        ("continue", {"metrics.jsonl", "mine.txt"}),
        ("archive", {"previous-1/metrics.jsonl", "previous-1/.megatron-snip", "mine.txt"}),
        ("delete", {"mine.txt"}),
        ("refuse", {"metrics.jsonl", "mine.txt"}),
    ],
)
def test_a_run_is_opened_under_its_lock_and_the_old_runs_files_are_treated_as_asked(
    tmp_path: Path, old_run: OldRun, left: set[str]
) -> None:
    mark(tmp_path)
    for name in ("metrics.jsonl", "mine.txt"):
        (tmp_path / name).write_text("")
    if old_run == "refuse":
        with pytest.raises(UsageError, match="holds another run"):
            open_run(tmp_path, {}, old_run)
    else:
        run = open_run(tmp_path, {"seed": 1}, old_run)
        left |= {"config.yaml", "versions.json"}
        with (
            ProcessPoolExecutor(1, get_context("fork")) as other,
            pytest.raises(UsageError, match="is in use by"),
        ):
            other.submit(open_run, tmp_path, {"seed": 2}, "delete").result()
        assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 1}
        run.close()
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert found == left | {MARKER}


def test_a_killed_run_leaves_complete_lines(tmp_path: Path) -> None:
    script = (
        "import os; from pathlib import Path\n"
        "from megatron_snip.reporting.run_directory import RunDirectory\n"
        f"run = RunDirectory(Path({str(tmp_path)!r}))\n"
        "for k in range(300):\n"
        "    run.append_metrics({'iteration': k, 'text': 'x' * 101})\n"
        "os._exit(9)\n"
    )
    assert run_python("-c", script).returncode == 9
    assert [row["iteration"] for row in rows(tmp_path)] == list(range(300))


def test_a_writer_that_fails_stops_neither_training_nor_the_other_writers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def write(self, event: Event) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("disk full")

    reporter = Reporter([Failing(), RunDirectory(tmp_path)])
    reporter.write(Event(1, Metrics({"loss": 2.0})))
    reporter.write(Event(2, Metrics({"loss": 1.0})))
    reporter.close()
    assert [row["loss"] for row in rows(tmp_path)] == [2.0, 1.0]
    failures = [r.message for r in caplog.records if "Failing failed" in r.message]
    assert failures == ["snip: Failing failed: OSError: disk full"]  # once
