"""Fixtures that run a command of `megatron-snip` in this process."""

from collections.abc import Callable

import pytest

from megatron_snip.__main__ import main


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
