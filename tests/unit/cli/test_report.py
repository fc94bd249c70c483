"""`megatron-snip report`: what is written, what is said, what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli import report
from tests.unit.reporting.runs import Shape, config, write_run
from tests.unit.reporting.sketch import only_sketch


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", Shape(config(enabled=False), steps=4))


def test_the_report_goes_into_the_run_and_its_path_is_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{run / 'report' / 'report.html'}\n"
    assert "4 pictures beside it" in err
    assert (run / "report" / "loss.png").stat().st_size > 1000
    only_sketch(monkeypatch)
    assert main(["report", str(run)]) == 0  # again: the report itself is no part of the run


def test_output_goes_where_it_is_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_sketch(monkeypatch)
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert not (run / "report").exists()


def test_following_a_finished_run_prints_its_end(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--follow"]) == 0
    assert "finished after step 3" in capsys.readouterr().out


def test_a_live_view_is_left_with_an_interrupt(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "follow", interrupted)
    assert main(["report", str(run), "--follow"]) == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["none"], "cannot find the run directory 'none'"),
        (["RUN", "--follow", "--output", "x"], "--follow writes no report"),
        (["RUN", "RUN"], "is given twice"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    run: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *(str(run) if word == "RUN" else word for word in words)]) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1


def test_without_the_packages_that_draw_the_remedy_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        report, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert main(["report", str(run)]) == 2
    assert "a report needs matplotlib; pip install 'megatron-snip[report]'" in (
        capsys.readouterr().err
    )
