"""Fixtures that run a command of `megatron-snip` in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.planning.problem import write_problem


@pytest.fixture
def problem(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The file of the planning problem that a test module calls PROBLEM."""
    path = tmp_path / "problem.json"
    write_problem(request.module.PROBLEM, path)
    return str(path)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which ends with `status`; returns what it printed."""

    def run(*words: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which prints one line, an error, and ends with status 2; returns the line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("megatron-snip: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run
