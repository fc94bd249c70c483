"""`python -m megatron_snip`: a script runs as Python would run it, and every error is one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_snip import __main__
from megatron_snip.__main__ import main
from megatron_snip.cli.script import expand, is_script, run_script
from megatron_snip.errors import LONGEST, UsageError, shown
from megatron_snip.patches.install import REGISTRY
from tests.processes import run_python
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
    assert done.stderr == "status 141\n"  # 128 + SIGPIPE, with a table as with plain text


def test_a_name_too_long_for_any_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "x" * 5000]) == 2
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


def test_a_bug_is_one_line_and_then_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(words: list[str]) -> int:
        raise KeyError("absent")

    monkeypatch.setattr(__main__, "run_command", broken)
    assert main(["doctor"]) == 1
    first, second, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("megatron-snip: KeyError: 'absent'; this is a bug of megatron-snip")
    assert second.startswith("Traceback") and rest[-1] == "KeyError: 'absent'"


def test_what_an_error_quotes_cannot_reach_the_terminal(tmp_path: Path) -> None:
    error = UsageError("a\nb \x1b[31m \udcff \u202e ok \u00e9 " + "x" * 5000 + " the end")
    text = shown(error)
    assert text.startswith("a\\nb \\x1b[31m \\udcff \\u202e ok \u00e9 xxx")
    assert text.endswith(" the end") and len(text) == LONGEST
    assert len(shown("\U0010ffff" * LONGEST)) == LONGEST  # ten characters each, once escaped
    assert text.isprintable()
    assert shown("fine") == "fine"


MEGATRON = """
import argparse

def add_megatron_arguments(parser):
    parser.add_argument("--distributed-backend", default="nccl")
    return parser

def validate_args(args, defaults={}):
    return args

def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args()
"""

SCRIPT = """
import json, sys
import torch
from megatron.training import arguments
import neighbour
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "path": sys.path[0],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "args": vars(arguments.parse_args()),
    "cuda": torch.cuda.is_available(),
}))
sys.exit(7)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like Megatron-LM's: a script without suffix, neighbours, and `megatron.training`."""
    training = tmp_path / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").write_text("")
    (training / "arguments.py").write_text(MEGATRON)
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "pretrain").write_text(SCRIPT)
    return tmp_path


def test_the_script_runs_as_main_with_its_own_path_and_arguments(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    script = str(checkout / "pretrain")
    (elsewhere / "words.args").write_text("--distributed-backend x  # from a file\n")
    done = run_python("-m", "megatron_snip", "--cpu", script, "@words.args", cwd=elsewhere)
    assert done.returncode == 7, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "name": "__main__",
        "file": script,
        "argv": [script, "--distributed-backend", "x"],
        "path": str(checkout),
        "main": True,
        "args": {"distributed_backend": "x"},
        "cuda": True,  # the CPU patch answers; scripts assert it
    }


AGAIN = """
import json, os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execvpe(sys.executable, [sys.executable, *sys.argv, "new"], os.environ)
from megatron_snip.patches import cpu
from megatron_snip.patches.install import REGISTRY
print(json.dumps([sys.argv[1:], REGISTRY.session.given, cpu.is_installed()]))
REGISTRY.session.found_megatron = True
"""


def test_a_script_that_starts_itself_anew_keeps_snip(tmp_path: Path) -> None:
    """Bridge's recipe runner does, to set environment variables; its parser knows its own flags."""
    (tmp_path / "recipe.py").write_text(AGAIN)
    words = ["recipe.py", "--snip-interval", "9", "--recipe", "9", "--snip", "a=b"]
    done = run_python("-m", "megatron_snip", "--cpu", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    argv, flags, on_cpu = json.loads(done.stdout.splitlines()[-1])
    assert argv == ["--recipe", "9", "a=b", "new"]
    assert flags == {"interval": "9", "enabled": True}
    assert on_cpu


ANOTHER = """
import os, sys
words = [sys.executable, "recipe.py", *sys.argv[1:]]
os.execvpe(sys.executable, words, {**os.environ, "AGAIN": ""})
"""


@pytest.mark.slow  # each of them imports Megatron twice; see ../patches/test_new_program.py
@pytest.mark.parametrize("start", ["-m megatron_snip", ""], ids=["runner", "auto"])
def test_a_script_that_starts_another_one_keeps_snip(tmp_path: Path, start: str) -> None:
    """Bridge's performance recipes are started by such a script."""
    (tmp_path / "recipe.py").write_text(AGAIN)
    in_code = "" if start else "import megatron_snip.auto"
    (tmp_path / "bootstrap.py").write_text(in_code + ANOTHER)
    words = [*start.split(), "bootstrap.py", "--snip", "a=b"]
    done = run_python(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["a=b"], {"enabled": True}, False]


def test_a_script_for_another_release_of_bridge_gets_one_more_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "recipe.py"
    name = "megatron.bridge.recipes.llama"
    script.write_text(f"raise ImportError('cannot import name x', name={name!r})")
    with pytest.raises(ImportError, match="cannot import name x"):
        run_script(script)
    text = capsys.readouterr().err
    assert f"does not have what '{script}' imports from {name}" in text and text.count("\n") == 1


def test_a_script_that_never_trains_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "recipe.py"
    script.write_text("")
    assert run_script(script) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(REGISTRY.session, "given", {"enabled": True})
    monkeypatch.setattr(REGISTRY.session, "found_megatron", False)
    assert run_script(script) == 0
    assert "neither Megatron-LM's nor Megatron-Bridge's pretrain" in capsys.readouterr().err


def test_the_first_word_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_text("")
    (tmp_path / "script").write_text("")
    assert is_script(["pretrain.py", "--snip"])
    assert is_script(["script"])  # a file without a suffix
    assert is_script(["--cpu", "pretrain.py"]) and is_script(["--cpu"])
    assert not is_script(["nonsense"]) and not is_script(["--version"])


def test_argument_files_are_read_as_a_shell_reads_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one.args", tmp_path / "two.args"
    one.write_text("# one\n--a 1\n\n--b 'two words'  # a comment\n")
    two.write_text(f"--a 2 @{one}")
    words = ["x", "--a", "1", "--b", "two words", "--c", "--a", "2", f"@{one}", "@"]
    assert expand(["x", f"@{one}", "--c", f"@{two}", "@"]) == words


@pytest.mark.parametrize("content", [b"\xff\xfe", b"'", b"x" * (1 << 21), None])
def test_bad_argument_files_are_one_line(
    content: bytes | None, tmp_path: Path, refused: Any
) -> None:
    file = tmp_path / "a.args"
    if content is not None:
        file.write_bytes(content)
    assert f"argument file '{file}'" in refused("none.py", f"@{file}")


def test_a_script_that_wants_a_gpu_is_told_of_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron asserts it before it reads its flags, so they do not matter."""
    script = tmp_path / "pretrain.py"
    script.write_text('assert False, "Megatron requires CUDA."\n')
    with pytest.raises(SystemExit) as end:  # no traceback, which would follow the line
        run_script(script)
    wanted = f"--cpu comes before the script: -m megatron_snip --cpu {script} ..."
    assert (end.value.code, wanted in capsys.readouterr().err) == (2, True)
