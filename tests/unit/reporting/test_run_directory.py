"""A run's files: complete or absent when written; in progress, resumed or damaged when read."""

import errno
import json
import math
import os
import resource
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_snip.__main__ import main
from megatron_snip.directory import MARKER, mark_new_run, run_id
from megatron_snip.directory_lease import LOCK
from megatron_snip.errors import UsageError
from megatron_snip.options import BF16
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, read_plan, write_plan
from megatron_snip.planning.problem import read_problem
from megatron_snip.reporting import run_directory
from megatron_snip.reporting.events import Event, Metrics, Notice, Reporter, Settings
from megatron_snip.reporting.metrics_file import MetricsWriter, drop_damaged_lines, read_metrics
from megatron_snip.reporting.opening import OldRun, is_directory_of, open_run
from megatron_snip.reporting.report import read_reference
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.run_record import read_run
from tests.processes import run_copy
from tests.unit.reporting.runs import (
    Shape,
    applied,
    config,
    measurement_at,
    plan_from,
    write_events,
    write_run,
)

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


def test_a_run_that_continues_keeps_every_file_and_row(tmp_path: Path) -> None:
    write_run(tmp_path, SHAPE)
    mark_new_run(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.json*") if p.name != "versions.json"}
    assert len(before) > 8
    run = open_run(tmp_path, {}, continues=True)
    run.begin()
    run.close()
    assert {path: path.read_bytes() for path in before} == before


def test_evaluations_after_training_complete_the_last_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write(Event(1, Metrics({"final_validation_loss": 3.0}, is_addition=True)))  # none yet
    for iteration in (1, 2):
        run.write(Event(iteration, Metrics({"loss": 2.0})))
    run.write(Event(2, Metrics({"final_validation_loss": 1.5}, is_addition=True)))
    run.write(Event(2, Metrics({"test_loss": 1.6}, is_addition=True)))
    run.close()
    first, second = rows(run.path)
    assert first == {"iteration": 1, "loss": 2.0, "wall_s": first["wall_s"]}
    added = {"final_validation_loss": 1.5, "test_loss": 1.6}
    assert second == {"iteration": 2, "loss": 2.0, "wall_s": second["wall_s"], **added}


def test_each_line_is_completed_where_evaluations_come_between_iterations(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for iteration in (1, 2, 3):
        run.write(Event(iteration, Metrics({"loss": 2.0})))
        added = Metrics({"final_validation_loss": 1.0 * iteration}, is_addition=True)
        run.write(Event(iteration, added))
    run.close()
    found = [(row["iteration"], row["final_validation_loss"]) for row in rows(run.path)]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_job_that_ends_within_an_iteration_leaves_its_notices(tmp_path: Path) -> None:
    notice = {"kind": "guard", "message": "loss nan"}
    for last, iteration, expected in ((1, 2, [1, 2]), (0, 1, [1]), (2, 2, [2])):
        run = RunDirectory(tmp_path / str(last))
        for at in range(max(1, last), last + 1):
            run.write(Event(at, Metrics({"loss": 2.0})))
        run.close()
        again = RunDirectory(run.path)  # one process trained, the next one fails
        again.write(Event(iteration, Notice("guard", "loss nan")))
        again.close()
        again.close()
        found = rows(run.path)
        assert [row["iteration"] for row in found] == expected
        # An iteration that has ended keeps its row.
        assert (found[-1].get("notices") == [notice]) == (iteration > last)


def test_the_settings_that_a_run_follows_are_those_in_its_file(tmp_path: Path) -> None:
    shape = Shape(config(efficiency_target=0.5), iterations=2)
    run = RunDirectory(tmp_path)
    run.start({"train_iters": 9, "snip": config(efficiency_target=0.75).model_dump(mode="json")})
    run.write(Event(0, Settings(shape.config.model_dump(mode="json"))))
    write_events(run, shape)
    record = read_run(tmp_path)
    assert (record.target, record.train_iters) == (0.5, 9)


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


def test_a_row_that_a_crash_has_lost_is_written_again(tmp_path: Path) -> None:
    """A plan's file is synced before the row that names it."""
    run = open_run(tmp_path, {})
    for at in range(38, 43):
        if at == 39:
            run.write(Event(at, applied(SHAPE, PLAN)))
        run.write(Event(at, Metrics({})))
    run.close()
    metrics = tmp_path / "metrics.jsonl"
    first = metrics.read_text().splitlines(keepends=True)[0]
    metrics.write_text(first + "\0" * 40)
    run = open_run(tmp_path, {}, continues=True)
    run.write(Event(42, applied(SHAPE, PLAN, num_changed=0, resumed=True)))
    run.write(Event(43, Metrics({})))
    run.close()
    assert [row.get("plan_iteration") for row in rows(tmp_path)] == [None, 30]
    assert read_run(tmp_path).plan == PLAN


def test_a_plan_that_the_run_left_again_is_not_the_one_that_its_rows_name(tmp_path: Path) -> None:
    """The rows name PLAN at 31 and another plan at 33; the run goes back to 32, and on to 34."""
    linears = dict.fromkeys(PLAN.linears, BF16)
    changes = {"iteration": 32, "linears": linears, "digest": assignment_digest(linears)}
    run = RunDirectory(tmp_path)
    for iteration, plan in ((31, PLAN), (33, PLAN.model_copy(update=changes))):
        run.write(Event(iteration, applied(SHAPE, plan)))
        run.write(Event(iteration, Metrics({})))
    for iteration in (32, 34):
        run.write(Event(iteration, Metrics({})))
    run.write(Event(34, applied(SHAPE, PLAN, resumed=True)))
    run.write(Event(35, Metrics({})))
    run.close()
    named = [(row["iteration"], row.get("plan_iteration")) for row in rows(tmp_path)]
    assert named == [(31, 30), (33, 32), (32, None), (34, None), (35, None)]


def test_text_that_utf_8_cannot_hold_is_written_so_that_it_is_read(tmp_path: Path) -> None:
    """Paths are bytes: Python has those of a name in Latin-1 as lone surrogates."""
    name = os.fsdecode(b"r\xe9sum\xe9")
    settings = {"data_path": f"/data/{name}", "snip": config().model_dump(mode="json")}
    run = open_run(tmp_path, settings)
    run.write(Event(1, Notice("refresh_failed", f"cannot write {name}")))
    run.write(Event(1, Metrics({})))
    run.close()
    record = read_run(tmp_path)
    assert record.config["data_path"] == r"/data/r\udce9sum\udce9"
    assert record.metrics.rows[0]["notices"][0]["message"] == r"cannot write r\udce9sum\udce9"


def test_two_plans_of_one_iteration_have_a_file_each(tmp_path: Path) -> None:
    """A run resumes with another plan in the iteration whose problem it solves again."""
    linears = dict.fromkeys(PLAN.linears, BF16)
    changes = {"linears": linears, "digest": assignment_digest(linears)}
    other = PLAN.model_copy(update=changes)
    run = RunDirectory(tmp_path)
    for iteration, plan, is_resumed in ((31, PLAN, False), (33, other, False), (34, other, True)):
        run.write(Event(iteration, applied(SHAPE, plan, resumed=is_resumed)))
        run.write(Event(iteration, Metrics({})))
    run.close()
    assert [row.get("plan_iteration") for row in rows(tmp_path)] == [30, 31, None]
    for number, plan in ((30, PLAN), (31, other)):
        assert read_plan(tmp_path / "plans" / f"{number}.json") == plan
    precision = json.loads((tmp_path / "precision" / "33.json").read_text())
    assert precision["plan_iteration"] == 31


@pytest.mark.parametrize(
    ("old_run", "left"),
    [
        (None, {"metrics.jsonl", "mine.txt"}),
        ("archive", {"previous-1/metrics.jsonl", "previous-1/.megatron-snip", "mine.txt"}),
        ("delete", {"mine.txt"}),
        ("refuse", {"metrics.jsonl", "mine.txt"}),
    ],
)
def test_a_run_is_opened_under_its_lock_and_the_old_runs_files_are_treated_as_asked(
    tmp_path: Path, old_run: OldRun | None, left: set[str]
) -> None:
    """None: the run continues."""
    mark_new_run(tmp_path)
    assert is_directory_of(tmp_path, run_id(tmp_path)) and not is_directory_of(tmp_path, "another")
    for name in ("metrics.jsonl", "mine.txt"):
        (tmp_path / name).write_text("")
    if old_run == "refuse":
        with pytest.raises(UsageError, match="holds another run"):
            open_run(tmp_path, {}, False, old_run)
    else:
        run = open_run(tmp_path, {"seed": 1}, old_run is None, old_run or "refuse")
        run.begin()
        left |= {"config.yaml", "versions.json"}
        with (
            ProcessPoolExecutor(1, get_context("fork")) as other,
            pytest.raises(UsageError, match="is in use by"),
        ):
            other.submit(open_run, tmp_path, {"seed": 2}, False, "delete").result()
        assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 1}
        run.close()
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert found == left | {MARKER}


@pytest.mark.parametrize("old_run", ["archive", "delete", None])
def test_a_run_that_ends_before_it_begins_leaves_the_run_before_as_it_was(
    tmp_path: Path, old_run: OldRun | None
) -> None:
    """It may be refused while its model is built, or for its plan or its checkpoint."""
    write_run(tmp_path, SHAPE)
    mark_new_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    open_run(tmp_path, {"seed": 1}, old_run is None, old_run or "refuse").close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    first = run_id(tmp_path)
    run = open_run(tmp_path, {"seed": 1}, old_run is None, old_run or "refuse")
    run.write(Event(6, Metrics({"loss": 2.0})))
    run.close()
    assert rows(tmp_path)[-1]["iteration"] == 6
    assert (tmp_path / "health" / "11.json").exists() == (old_run is None)
    assert (run_id(tmp_path) == first) == (old_run is None)
    assert read_metrics(tmp_path / "metrics.jsonl").last_iteration == 6


@pytest.mark.parametrize("old_run", ["archive", "delete"])
def test_a_plan_file_is_not_moved_or_deleted_before_it_is_read(
    tmp_path: Path, old_run: OldRun
) -> None:
    write_run(tmp_path, SHAPE)
    mark_new_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    plan_file = str(tmp_path / "health" / ".." / "plans" / "11.json")
    with pytest.raises(UsageError, match=r"11\.json' is a file of an earlier run") as caught:
        open_run(tmp_path, {"snip": {"plan_file": plan_file}}, False, old_run)
    assert caught.value.field == "plan_file"
    assert {path: path.read_bytes() for path in before} == before
    open_run(tmp_path, {"snip": {"plan_file": plan_file}}, continues=True).close()


def test_a_resumed_run_drops_what_a_crash_has_damaged_and_no_row(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    drop_damaged_lines(metrics)
    good = [json.dumps({"iteration": i, "text": "\u2028 is not an end of line"}) for i in (1, 5, 3)]
    damaged = ['{"iteration": 1e999}', "[" * 10**5, "[1]", '{"iteration": 0}']
    data = "\n".join([*good, *damaged]).encode() + b'\n{"iteration": 1, "x": "\xff\xfe'
    metrics.write_bytes(data)
    drop_damaged_lines(metrics)
    assert metrics.read_text(encoding="utf-8") == "".join(f"{line}\n" for line in good)


def test_a_killed_run_leaves_complete_lines(tmp_path: Path) -> None:
    def train() -> None:
        metrics = MetricsWriter(tmp_path / "metrics.jsonl")
        for k in range(300):
            metrics.append({"iteration": k, "text": "x" * 101})
        os._exit(9)

    assert run_copy(train) == 9
    assert [row["iteration"] for row in rows(tmp_path)] == list(range(300))


def test_a_writer_that_fails_stops_neither_training_nor_the_other_writers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def write(self, event: Event) -> None:
            self.close()

        def close(self) -> None:
            raise OSError("disk full")

    reporter = Reporter([Failing(), RunDirectory(tmp_path)])
    reporter.write(Event(1, Metrics({"loss": 2.0})))
    reporter.write(Event(2, Metrics({"loss": 1.0})))
    reporter.close()
    assert [row["loss"] for row in rows(tmp_path)] == [2.0, 1.0]
    failures = [r.message for r in caplog.records if "Failing failed" in r.message]
    (failure,) = failures  # once
    assert failure.endswith("Failing failed: OSError: disk full")


def test_a_run_is_read_without_a_plan_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_disk_with_space_from_the_second_plan_on(plan: PrecisionPlan, path: Path) -> None:
        if plan.iteration == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_plan(plan, path)

    monkeypatch.setattr(run_directory, "write_plan", on_a_disk_with_space_from_the_second_plan_on)
    record = read_run(write_run(tmp_path / "run", SHAPE))
    assert [(s.start, s.plan.iteration) for s in record.plans] == [(13, 11), (21, 19)]


NOTICE = Notice("refresh_failed", "measurement failed on rank 0")
NOTICED = Shape(config(), notices=((13, NOTICE),), backend="simulate")


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "complete", NOTICED)


@pytest.fixture
def run(complete: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(complete, tmp_path / "run")


def test_the_record_has_what_the_run_wrote(complete: Path) -> None:
    record = read_run(complete)
    assert record.name == "complete" and record.snip == NOTICED.config
    assert record.metrics.last_iteration == record.train_iters == 24
    assert [(s.start, s.end) for s in record.plans] == [(5, 13), (13, 21), (21, 25)]
    assert [span.plan.iteration for span in record.plans] == [3, 11, 19]
    assert record.plan is not None and record.plan.iteration == 19
    assert record.divergences is not None and record.divergences.iteration == 19
    assert record.problem is not None and record.simulated is True
    assert record.metrics.notices == [(13, "refresh_failed", NOTICE.message)]
    assert (record.target, record.lowest_formats_label) == (0.6, "fp4")
    assert record.quality_share(0.505) == pytest.approx(0.5)


def test_the_backend_that_ran_tells_whether_linears_were_simulated(tmp_path: Path) -> None:
    te = read_run(write_run(tmp_path / "te", Shape(config(), iterations=6, backend="te")))
    unknown = read_run(write_run(tmp_path / "unknown", Shape(config(), iterations=6)))
    asked = Shape(config(backend="simulate"), iterations=2)
    assert te.simulated is False and unknown.simulated is None
    assert read_run(write_run(tmp_path / "asked", asked)).simulated is True


def test_a_resumed_run_shows_only_what_it_repeated(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", NOTICED)
    directory = RunDirectory(path)
    directory.write(Event(10, Metrics({"loss": 5.0})))  # resumed after iteration 9
    directory.close()
    record = read_run(path)
    assert record.metrics.last_iteration == 10
    assert [(s.start, s.end) for s in record.plans] == [(5, 11)]
    assert record.divergences is not None and record.divergences.iteration == 3


def test_a_refresh_that_the_run_did_not_repeat_is_not_its_last(tmp_path: Path) -> None:
    """It went back to iteration 8, and refreshes at 3 only since."""
    path = write_run(tmp_path / "run", SHAPE)
    directory = RunDirectory(path)
    for iteration in range(9, 23):
        directory.write(Event(iteration, Metrics({"loss": 5.0})))
    directory.close()
    record = read_run(path)
    assert record.divergences is not None and record.divergences.iteration == 3
    assert [table.iteration for table in record.health] == [3]


def test_a_run_in_progress_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start({"train_iters": 100, "snip": NOTICED.config.model_dump(mode="json")})
    write_events(directory, Shape(config(), iterations=13), close=False)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"iteration": 14, "lo')
    record = read_run(tmp_path / "run")
    assert record.metrics.last_iteration == 13 and record.train_iters == 100
    directory.close()


def test_runs_without_plans(tmp_path: Path) -> None:
    off = read_run(write_run(tmp_path / "off", Shape(config(enabled=False), iterations=3)))
    assert off.plans == () and off.plan is None and off.target is None
    measured = read_run(write_run(tmp_path / "m", Shape(config(collect_only=True), iterations=5)))
    assert measured.plans == () and measured.divergences is not None and measured.target is None


@pytest.mark.parametrize("snip", [{"interval": -8}, "yes", None])
def test_settings_that_cannot_be_read_are_no_error(run: Path, snip: Any) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"megatron": {"train_iters": 9}, "snip": snip}))
    record = read_run(run)
    assert record.snip is None and record.quality_share(1.0) is None and record.train_iters == 9


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"loss": 1.0}', "iteration: Field required"),
        ('{"iteration": 0}', "iteration: must be greater than or equal to 1, got 0"),
        ('{"iteration": 1e200}', "iteration: must be a valid integer"),
        ('{"iteration": 1, "wall_s": true}', "wall_s: must be a valid number"),
        ('{"iteration": 1, "loss": "x"}', "loss: must be a valid number, got 'x'"),
        ('{"iteration": 1, "loss": -1e308}', "loss: must be greater than or equal to -1e+150"),
        ('{"iteration": 1, "notices": [{"kind": "guard"}]}', "notices.0.message: Field required"),
        ('{"iteration": 1', "is not valid JSON"),
        ("", "is not valid JSON"),
    ],
)
def test_a_bad_row_is_left_out_and_named_with_its_line(
    tmp_path: Path, line: str, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = '{"iteration": 1}\n', '{"iteration": 2}\n'
    path.write_text(f"{rows[0]}{line}\n{rows[1]}")
    assert [row["iteration"] for row in read_metrics(path).rows] == [1, 2]
    (warning,) = caplog.messages
    assert f"'{path}', line 2" in warning and complaint in warning and "\n" not in warning
    path.write_text(line + "\n")  # with no row at all there is nothing to report
    with pytest.raises(UsageError, match="line 1"):
        read_metrics(path)


@pytest.mark.parametrize("tail", [b"", b" ", b"\0" * 512, b"\xff\xfe", b"[]", b"null", b"{}"])
def test_lines_that_a_crash_left_are_left_out_with_one_warning(
    tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n' + tail + b"\n" + tail + b"\n")
    assert read_metrics(path).last_iteration == 1
    (warning,) = caplog.messages
    assert "2 of 3 lines are left out (2, 3)" in warning


def test_a_path_that_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "save" / "snip").mkdir(parents=True)
    shutil.copy(run / "config.yaml", tmp_path / "save" / "snip")
    for path, complaint in (
        (tmp_path / "none", "cannot find the run directory"),
        (run / "config.yaml", "is a file; give the run's directory"),
        (tmp_path, "it has no config.yaml"),
        (tmp_path / "save", r"did you mean '.*snip'"),
        (tmp_path / "save" / "snip", "no iteration has ended"),
    ):
        with pytest.raises(UsageError, match=complaint):
            read_run(path)


def test_a_plan_that_is_missing_is_named(run: Path) -> None:
    (run / "plans" / "19.json").unlink()
    with pytest.raises(UsageError, match=r"19\.json"):
        read_run(run)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "plans", "divergences/19.json"])
def test_a_run_is_not_read_through_links_in_it(tmp_path: Path, name: str) -> None:
    """Whoever writes a run's directory would choose what a report shows; its own path is ours."""
    path = write_run(tmp_path / "run", NOTICED)
    linked = tmp_path / "linked"
    linked.symlink_to(path)
    whole = read_run(linked)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    kind = "folder" if name == "plans" else "regular file"
    with pytest.raises(UsageError, match=f"{name}' is no {kind}"):
        read_run(path)
    with pytest.raises(UsageError, match=f"{name}' is no {kind}"):
        read_reference(path)
    (path / name).unlink()
    (tmp_path / "elsewhere").rename(path / name)
    assert read_run(path).metrics == whole.metrics


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("problems", ["diff", "plans/19.json", "plans/19.json"]),
        ("problems/19.json", ["diff", "plans/19.json", "plans/19.json"]),
        ("divergences", ["plan", "problems/19.json", "--granularity", "gemm"]),
        ("config.yaml", ["plan", "problems/19.json", "--granularity", "gemm"]),
    ],
)
def test_what_stands_beside_a_named_file_is_not_read_through_links(
    tmp_path: Path, link: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", NOTICED)
    (path / MARKER).touch()
    given = [str(path / word) if "/" in word else word for word in words]
    (path / link).rename(tmp_path / "elsewhere")
    (path / link).symlink_to(tmp_path / "elsewhere")
    assert main(given) == 2
    assert f"{link}' is no " in capsys.readouterr().err


def test_a_disk_that_is_full_at_any_moment_leaves_a_run_that_can_be_read_and_continued(
    tmp_path: Path,
) -> None:
    """No file may have more bytes than a limit; the last line of the metrics may be cut."""
    limits = (0, 1, 50, 100, 101, 150, 333, 500, 1000, 2000, 4000, 10000)
    settings = {"train_iters": SHAPE.iterations, "snip": SHAPE.config.model_dump(mode="json")}

    def train() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in limits:
            run = open_run(tmp_path / str(limit), settings)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            write_events(run, SHAPE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert run_copy(train) == 0
    counts = []
    for limit in limits:
        path = tmp_path / str(limit)
        assert not list(path.rglob("*.tmp"))
        run = open_run(path, settings, continues=True)
        run.write(Event(40, Metrics({"loss": 1.0})))
        run.close()
        counts.append(len(read_run(path).metrics.rows) - 1)
    assert counts == sorted(counts)
    assert counts[0] == 0 and counts[-1] == SHAPE.iterations


def test_a_job_whose_directory_another_one_takes_writes_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = open_run(tmp_path, {"seed": 1})
    reporter = Reporter([old])
    reporter.write(Event(1, Metrics({"loss": 2.0})))
    (tmp_path / LOCK).unlink()  # as if its lock could not be seen
    new = open_run(tmp_path, {"seed": 2})
    new.write(Event(1, Metrics({"loss": 3.0})))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for iteration in (2, 3):
        reporter.notify(iteration, "guard", "a spike")
        reporter.write(Event(iteration, Metrics({"loss": 2.0})))
    reporter.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert caplog.text.count("this job writes nothing there any more") == 1
    new.write(Event(2, Metrics({"loss": 3.0})))
    assert [row["loss"] for row in rows(tmp_path)] == [3.0, 3.0]
    assert [row["loss"] for row in rows(tmp_path / "previous-1")] == [2.0]
    new.close()
