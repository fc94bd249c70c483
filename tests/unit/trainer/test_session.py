"""Who listens on which rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_snip.reporting.reporter import NullReporter

from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.summary import SummaryReporter
from megatron_snip.trainer.config import make_train_config
from megatron_snip.trainer.session import _console, make_reporter


def test_folders_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    _console(80).print("runs/[/foo]/:smile:")
    assert capsys.readouterr().out == "runs/[/foo]/:smile:\n"


def test_ranks_without_a_directory_report_nothing() -> None:
    config = make_train_config({"snip": {"tensorboard": True, "wandb": True}})
    assert isinstance(make_reporter(config, None, SummaryReporter()), NullReporter)


def test_tensorboard_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for wanted in (False, True):
        config = make_train_config({"snip": {"tensorboard": wanted}})
        run = RunDirectory(tmp_path / str(wanted))
        reporter = make_reporter(config, run, SummaryReporter(), first_step=3)
        reporter.metrics(3, {"loss": 2.0})
        reporter.close()
        assert len(list(run.path.glob("tensorboard/events.*"))) == int(wanted)
