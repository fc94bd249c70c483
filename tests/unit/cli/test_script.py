"""`python -m megatron_snip SCRIPT ARGS`: as Python would run the script."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.cli.script import expand, is_script
from tests.processes import run_python

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
    """A folder like Megatron-LM's: a script, its neighbours, and `megatron.training`."""
    training = tmp_path / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").write_text("")
    (training / "arguments.py").write_text(MEGATRON)
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "pretrain.py").write_text(SCRIPT)
    return tmp_path


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "megatron_snip", *words, cwd=cwd)


def test_the_script_runs_as_main_with_its_own_path_and_arguments(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    script = str(checkout / "pretrain.py")
    (elsewhere / "words.args").write_text("--distributed-backend x  # from a file\n")
    done = run("--cpu", script, "@words.args", cwd=elsewhere)
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


def test_a_missing_seam_is_one_line(checkout: Path) -> None:
    done = run("pretrain.py", "--snip", cwd=checkout)
    assert done.returncode == 2
    assert "megatron.training" in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
