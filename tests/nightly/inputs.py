"""Every command under files of a real run that were changed: one line and exit code 2, or success.

    python -m pytest tests/nightly/inputs.py

The files are those that a small run of `megatron-snip train` writes, its checkpoint's run.json and
the exports of its plan. Each is changed by `tests/hostile/mutations.py`, which knows its structure,
and read by the commands that a user would give it to. An answer takes at most `CPU_S` of CPU more
than that to the good file.
"""

import io
import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from megatron_snip.__main__ import main
from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.errors import UsageError
from megatron_snip.trainer.session import check_run
from tests.distributed.test_trainer import command, run_command
from tests.hostile.mutations import mutants

CPU_S = 2.0

SNIP = {"enabled": True, "start_step": 11, "interval": 4, "lag": 3, "efficiency_target": 0.5}
SETTINGS: dict[str, Any] = {
    "num_layers": 1,
    "tensor_model_parallel_size": 1,
    "global_batch_size": 2,
    "train_iters": 16,
    "snip": SNIP,
}
"""Refreshes at 11 and 15."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "run/config.yaml": ("stats {run}", "train --config {file} --run-dir {new}"),
    "run/metrics.jsonl": ("report {run} --output {new}",),
    "run/versions.json": ("report {run} --output {new}",),
    "run/problems/11.json": ("plan {file}", "import {yaml} {out}"),
    "run/divergences/11.json": ("stats {run} --iteration 11",),
    "run/health/11.json": ("stats {run} --iteration 11 --health", "stats {run} --csv"),
    "run/plans/11.json": (
        "export {file} --to yaml --output {new}",
        "export {file} --to te-precision --capability 10.0 --nearest --output {new}",
        "export {file} --to torchtitan --nearest --output {new}",
        "export {file} --to modelopt --nearest --output {new}",
        "plan {run}/problems/11.json --previous {file} --change-penalty 0.1",
    ),
    "precision.yaml": ("import {file} --problem {run}/problems/11.json --output {new}",),
    "save/iter_0000016/run.json": ("train {same} --load {save} --save {save} --train-iters 20",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, `save` and `precision.yaml`."""
    folder = tmp_path_factory.mktemp("inputs")
    words = command(folder / "run", **SETTINGS, save=str(folder / "save"))
    done = run_command(words, folder)
    assert done.returncode == 0, done.stderr
    export = "export {}/run/plans/11.json --capability 10.0 --nearest --output {}/precision.yaml"
    assert main(export.format(folder, folder).split()) == 0
    return folder


def cases() -> Iterator[tuple[str, str]]:
    for name, commands in COMMANDS.items():
        for words in commands:
            yield name, words


@pytest.mark.parametrize(("name", "words"), [pytest.param(*case, id=case[1]) for case in cases()])
def test_an_answer_is_one_line_or_success(name: str, words: str, folder: Path) -> None:
    path = folder / name
    good = path.read_bytes()
    places = {"run": folder / "run", "save": folder / "save", "file": path}
    places |= {"yaml": folder / "precision.yaml", "new": folder / "new"}
    out = f"--problem {path} --output {folder / 'new'}"
    line = words.format(**places, out=out, same=f"--config {folder / 'settings.yaml'}").split()
    value = document(name, good)

    @settings(
        max_examples=150,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(content=mutants(value))
    def one(content: bytes) -> None:
        path.write_bytes(content + b"\n")
        begin = time.process_time()
        status, output = answer(line)
        seconds = time.process_time() - begin
        assert status == 0 or (status == 2 and output.count("\n") == 1), output[-2000:]
        assert seconds < CPU_S + usual_s, f"{seconds} s of CPU: {output[-200:]}"

    warnings.simplefilter("ignore")  # as in a rank; Megatron warns of its own settings
    try:
        answer(line)  # imports
        begin = time.process_time()
        answer(line)
        usual_s = time.process_time() - begin  # a report draws its figures
        one()
    finally:
        path.write_bytes(good)


def document(name: str, content: bytes) -> Any:
    """Return the value of a good file; of metrics.jsonl its first line."""
    if name.endswith(".yaml"):
        return yaml.safe_load(content)
    return json.loads(content.splitlines()[0] if name.endswith(".jsonl") else content)


def answer(words: list[str]) -> tuple[int, str]:
    """Return the exit status and what was printed to stderr; `train` only checks its input."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        if words[0] != "train":
            return main(words), errors.getvalue()
        try:
            check_run(read_settings(build_parser("train").parse_args(words)), world_size=1)
        except (UsageError, OSError) as error:  # what a rank prints as one line
            print(error, file=sys.stderr)
            return 2, errors.getvalue()
    return 0, ""
