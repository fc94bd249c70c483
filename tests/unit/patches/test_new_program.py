"""The command line of a script that a process becomes, with SNIP's words in it."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.patches.new_program import START, keep_in_new_program

FLAGS = ["--snip", "--snip-interval", "9"]
Programs = list[tuple[str, list[str], Any]]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """What this process would have become: it runs `bootstrap.py`, beside `recipe.py`."""
    monkeypatch.chdir(tmp_path)
    for name in ("bootstrap.py", "recipe.py"):
        Path(name).touch()
    monkeypatch.setattr(sys, "argv", ["bootstrap.py"])
    became: Programs = []

    def execve(path: str, args: list[str], environment: Any) -> None:
        became.append((path, args, environment))

    monkeypatch.setattr(os, "execve", execve)
    return became


@pytest.mark.parametrize(
    ("start", "script", "wanted"),
    [
        (("-m", "megatron_snip", "--cpu"), "bootstrap.py", ("-m", "megatron_snip", "--cpu")),
        (START, "recipe.py", START),
        ((), "bootstrap.py", ()),  # it imports megatron_snip.auto itself
        ((), "recipe.py", START),
    ],
)
def test_a_script_is_started_with_snip(
    programs: Programs, start: tuple[str, ...], script: str, wanted: tuple[str, ...]
) -> None:
    end = keep_in_new_program(start, FLAGS)
    os.execvpe(sys.executable, [sys.executable, "-u", script, "a=b"], {"AGAIN": "1"})
    end()
    words = [sys.executable, "-u", *wanted, script, "a=b", *FLAGS]
    assert programs == [(sys.executable, words, {"AGAIN": "1"})]


@pytest.mark.parametrize(
    "before",
    [["env", "A=1", "python3.12"], ["python", "-m", "torch.distributed.run", "--nnodes", "2"]],
)
def test_a_launcher_before_the_script_stays_there(programs: Programs, before: list[str]) -> None:
    end = keep_in_new_program(START, FLAGS)
    os.execve(before[0], [*before, "recipe.py"], {})
    end()
    assert programs == [(before[0], [*before, *START, "recipe.py", *FLAGS], {})]


def test_other_programs_and_what_starts_with_snip_are_left_alone(programs: Programs) -> None:
    lines = (
        ["ls", "recipe.py"],
        ["grep", "python", "recipe.py"],
        ["python", "-m", "megatron_snip", "recipe.py"],
        ["python", "-m", "package", "recipe.py"],
        ["python", "-c", "pass", "recipe.py"],
        ["python", "-V"],
    )
    end = keep_in_new_program(START, FLAGS)
    for words in lines:
        os.execve(words[0], words, {})
    end()
    os.execve("python", ["python", "recipe.py"], {})
    assert [words for _, words, _ in programs] == [*lines, ["python", "recipe.py"]]
