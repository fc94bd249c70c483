"""A run that grows while it is watched."""

from pathlib import Path

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.reporting.live_run import LiveRun
from megatron_snip.reporting.reporter import FileReporter
from megatron_snip.reporting.run_directory import RunDirectory
from tests.unit.reporting.runs import Shape, config, tell


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.start({"train_iters": 24, "snip": config().model_dump(mode="json")})
    return directory


def test_what_is_added_is_seen(directory: RunDirectory) -> None:
    run = LiveRun(directory.path)
    assert not run.refresh() and run.next_refresh == 2 and run.total == 24
    tell(FileReporter(directory), Shape(config(), steps=6), close=False)
    assert run.refresh()
    assert run.plan is not None and run.mark is not None
    assert (run.plan.step, run.mark.step) == (2, 4)
    assert run.next_refresh == 10 and not run.finished
    tell(FileReporter(directory), Shape(config(), steps=24), first=6)
    assert run.refresh() and run.finished and run.next_refresh is None
    assert not run.refresh()


def test_what_is_no_run_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot find"):
        LiveRun(tmp_path / "none")
