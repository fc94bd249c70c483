"""Long commands show progress on a terminal, and print nothing about it elsewhere."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli.common import progress
from tests.unit.planning.build import problem_of
from tests.unit.reporting.runs import Shape, config, write_run

PROBLEM = problem_of([(0.1, 0.4), (0.2, 0.3)])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal, and return what is written to it.

    Not a fixture: pytest sets its own stderr before the test.
    """
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def words_of(name: str, problem: str, folder: Path) -> list[str]:
    if name == "pareto":
        return ["pareto", problem, "--targets", "0:1:0.25"]
    run = write_run(folder / "run", Shape(config()))
    return ["report", str(run), "--output", str(folder / "out")]


@pytest.mark.parametrize(
    ("name", "doing"), [("pareto", "solving"), ("report", "making the report")]
)
def test_a_bar_on_a_terminal_and_the_same_result(
    name: str, doing: str, problem: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    words = words_of(name, problem, tmp_path)
    terminal = as_terminal(monkeypatch)
    assert main(words) == 0
    assert doing in terminal.getvalue()
    assert doing not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pareto", "report"])
def test_nothing_where_stderr_is_no_terminal(
    name: str, problem: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FORCE_COLOR, which many CI systems set, makes it no terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    words = words_of(name, problem, tmp_path)
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_the_time_left_follows_the_share_that_is_done(monkeypatch: Any) -> None:
    terminal = as_terminal(monkeypatch)
    with progress("working") as done:
        for share in (0.25, 0.5, 1.0):
            done(share)
    assert "0:00:00" in terminal.getvalue()
