"""A run directory as a record: complete, in progress, resumed, damaged."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_snip.errors import UsageError
from megatron_snip.reporting.events import Event, Metrics, Notice
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.run_record import read_metrics, read_run
from tests.unit.reporting.runs import Shape, config, write_events, write_run

NOTICE = Notice("refresh_failed", "measurement failed on rank 0")
SHAPE = Shape(config(), notices=((13, NOTICE),), backend="simulate")


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "complete", SHAPE)


@pytest.fixture
def run(complete: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(complete, tmp_path / "run")


def test_the_record_has_what_the_run_wrote(complete: Path) -> None:
    record = read_run(complete)
    assert record.name == "complete" and record.snip == SHAPE.config
    assert record.metrics.last_iteration == record.train_iters == 24
    assert [(s.start, s.end) for s in record.plans] == [(5, 13), (13, 21), (21, 25)]
    assert [span.plan.iteration for span in record.plans] == [3, 11, 19]
    assert record.plan is not None and record.plan.iteration == 19
    assert record.divergences is not None and record.divergences.iteration == 19
    assert record.problem is not None and record.simulated is True
    assert record.metrics.notices == [(13, "refresh_failed", NOTICE.message)]
    assert (record.target, record.lowest_formats) == (0.6, "fp4")
    assert record.quality_share(0.55) == pytest.approx(0.5)


def test_the_backend_that_ran_tells_whether_linears_were_simulated(tmp_path: Path) -> None:
    te = read_run(write_run(tmp_path / "te", Shape(config(), iterations=6, backend="te")))
    unknown = read_run(write_run(tmp_path / "unknown", Shape(config(), iterations=6)))
    asked = Shape(config(backend="simulate"), iterations=2)
    assert te.simulated is False and unknown.simulated is None
    assert read_run(write_run(tmp_path / "asked", asked)).simulated is True


def test_a_resumed_run_shows_only_what_it_repeated(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SHAPE)
    directory = RunDirectory(path)
    directory.write(Event(10, Metrics({"loss": 5.0})))  # resumed after iteration 9
    directory.close()
    record = read_run(path)
    assert record.metrics.last_iteration == 10
    assert [(s.start, s.end) for s in record.plans] == [(5, 11)]
    assert record.divergences is not None and record.divergences.iteration == 3


def test_a_run_in_progress_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start({"train_iters": 100, "snip": SHAPE.config.model_dump(mode="json")})
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
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"line 2") as caught:
        read_metrics(path)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


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
