"""The command line's own part: whatever goes wrong is one line and a status that says so."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_snip import __main__
from megatron_snip.__main__ import main
from megatron_snip.errors import LONGEST, UsageError, shown
from tests.unit.planning.build import problem_of

PROBLEM = problem_of([(0.1, 0.4), (0.2, 0.3)])
PLAN = [sys.executable, "-m", "megatron_snip", "plan"]


@pytest.mark.parametrize(
    ("redirection", "says"),
    [(">/dev/full", "No space left on device"), (">&-", "standard output is closed")],
)
@pytest.mark.parametrize("words", [["--help"], []])
def test_a_stdout_that_takes_nothing_is_one_line(
    redirection: str, says: str, words: list[str], problem: str
) -> None:
    command = ["sh", "-c", f'"$@" {redirection}', "sh", *PLAN, problem, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error(problem: str) -> None:
    command = ["sh", "-c", '{ "$@"; echo "status $?" >&2; } | true', "sh", *PLAN, problem]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stderr.startswith("status ") and done.stderr.count("\n") == 1


def test_a_name_too_long_for_any_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "x" * 5000]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "File name too long" in text and len(text) < LONGEST + 50


def test_ctrl_c_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "run_command", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "megatron-snip: ended by SIGINT\n"


def test_what_an_error_quotes_cannot_reach_the_terminal(tmp_path: Path) -> None:
    error = UsageError("a\nb \x1b[31m \udcff \u202e ok \u00e9 " + "x" * 5000 + " the end")
    text = shown(error)
    assert text.startswith("a\\nb \\x1b[31m \\udcff \\u202e ok \u00e9 xxx")
    assert text.endswith(" the end") and len(text) == LONGEST
    assert len(shown("\U0010ffff" * LONGEST)) == LONGEST  # ten characters each, once escaped
    assert text.isprintable()
    assert shown("fine") == "fine"
