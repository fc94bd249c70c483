"""A run directory as a record: complete, under way, resumed, damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_snip.errors import UsageError
from megatron_snip.reporting.reporter import FileReporter
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.run_record import planned_steps, read_run, snip_config
from tests.unit.reporting.runs import Shape, config, tell, write_run

SHAPE = Shape(config())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "whole", SHAPE)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "run")


def test_a_run_is_read_as_it_was_told(whole: Path) -> None:
    record = read_run(whole)
    assert record.name == "whole"
    assert record.snip == SHAPE.config
    assert record.num_steps == record.planned_steps == 24
    assert [(s.start, s.end) for s in record.spans] == [(0, 4), (4, 12), (12, 20), (20, 24)]
    assert record.spans[0].plan is None
    assert {str(o) for o in record.spans[0].linears.values()} == {"bf16"}
    assert [span.plan.step for span in record.plans if span.plan is not None] == [2, 10, 18]
    assert record.plan is not None and record.plan.step == 18
    assert record.problem_step == 18 and record.divergences is not None
    assert record.divergences.step == 18 and record.target == 0.6
    assert record.lowest_formats == "fp4"
    assert record.versions["python"] is not None


def test_a_resumed_run_shows_its_own_plans_only(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SHAPE)
    directory = RunDirectory(path)
    reporter = FileReporter(directory)
    reporter.metrics(9, {"loss": 5.0})  # went back to a checkpoint after 9 steps
    reporter.close()
    record = read_run(path)
    assert record.num_steps == 10
    assert [(s.start, s.end) for s in record.spans] == [(0, 4), (4, 10)]
    assert record.problem_step == 2  # what was measured at 10 and 18 is not this run's any more


def test_a_run_that_started_from_a_plan_does_not_claim_bf16(tmp_path: Path) -> None:
    shape = Shape(config(plan_file=tmp_path / "some.json"))
    record = read_run(write_run(tmp_path / "run", shape))
    assert record.spans[0].start == 4


def test_runs_without_snip_or_that_only_measure(tmp_path: Path) -> None:
    off = read_run(write_run(tmp_path / "off", Shape(config(enabled=False), steps=3)))
    assert off.spans == () and off.plan is None and off.target is None
    measured = read_run(write_run(tmp_path / "m", Shape(config(collect_only=True), steps=5)))
    assert measured.plans == () and measured.divergences is not None and measured.target is None


def test_settings_of_another_version_are_shown_but_not_believed() -> None:
    assert snip_config({"snip": {"interval": 8}}) is not None
    assert snip_config({"snip": {"of_the_future": 8}}) is None
    assert snip_config({"snip": {"interval": -8}}) is None
    assert snip_config({"snip": "yes"}) is None
    assert snip_config({}) is None


def test_planned_steps_are_the_trainers_or_megatrons() -> None:
    assert planned_steps({"train_iters": 7}) == 7
    assert planned_steps({"megatron": {"train_iters": 9}}) == 9
    assert planned_steps({"train_iters": True, "megatron": None}) is None


def test_what_is_no_run_is_said_in_one_line(run: Path, tmp_path: Path) -> None:
    for path, complaint in (
        (tmp_path / "none", "cannot find the run directory"),
        (run / "config.yaml", "is a file; give the run's directory"),
        (tmp_path, "it has no config.yaml"),
    ):
        with pytest.raises(UsageError, match=complaint):
            read_run(path)
    (tmp_path / "save" / "snip").mkdir(parents=True)
    shutil.copy(run / "config.yaml", tmp_path / "save" / "snip")
    with pytest.raises(UsageError, match=r"did you mean '.*snip'"):
        read_run(tmp_path / "save")
    with pytest.raises(UsageError, match="no training step has ended"):
        read_run(tmp_path / "save" / "snip")


def test_damage_is_named_with_its_file(run: Path) -> None:
    plan = json.loads((run / "plans" / "18.json").read_text())
    first = next(iter(plan["linears"]))
    plan["linears"][first]["fprop"] = "bf16"  # no longer what the digest says
    (run / "plans" / "18.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=r"18\.json"):
        read_run(run)
    (run / "plans" / "18.json").unlink()
    with pytest.raises(UsageError, match=r"18\.json"):
        read_run(run)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("versions.json", "[]"),
        ("divergences/18.json", '{"version": 2}'),
        ("divergences/18.json", '{"version": 1, "step": 1, "linears": [{}]}'),
        ("problems/18.json", "{"),
        ("config.yaml", "[1, 2]"),
    ],
)
def test_damaged_files_are_refused_in_one_line(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)
    with pytest.raises(UsageError) as caught:
        read_run(run)
    assert "\n" not in str(caught.value) and Path(name).name in str(caught.value)


def test_yaml_is_read_without_running_anything(run: Path, tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    (run / "config.yaml").write_text(f"a: !!python/object/apply:os.mkdir ['{bait}']\n")
    with pytest.raises(UsageError, match="not valid YAML"):
        read_run(run)
    assert not bait.exists()
    assert yaml.safe_load("a: 1") == {"a": 1}


def test_reading_needs_no_torch(whole: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from megatron_snip.reporting.run_record import read_run\n"
        f"read_run(Path({str(whole)!r}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


def test_a_run_under_way_is_told_without_closing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start({"train_iters": 100, "snip": SHAPE.config.model_dump(mode="json")})
    tell(FileReporter(directory), Shape(config(), steps=13), close=False)
    record = read_run(tmp_path / "run")
    assert record.num_steps == 13 and record.planned_steps == 100
    directory.close()
