"""Every command under files of a real run that were changed: one line and exit code 2, or success.

    python -m pytest tests/nightly/inputs.py

The files are those that a small run of `megatron-snip train` writes, the exports of its plan, and
SNIP's state in a checkpoint. Each is changed by `tests/hostile/mutations.py`, which knows its
structure, and read by the commands that a user would give it to. An answer takes at most `CPU_S` of
CPU more than that to the good file.
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
import torch
import yaml
from hypothesis import HealthCheck, given, settings

from megatron_snip.__main__ import main
from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.errors import LONGEST, SnipError, UsageError, shown
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.run.state import resumed_state
from megatron_snip.trainer.session import check_run
from tests.distributed.launch import run_ranks
from tests.distributed.small_model import NARROW, layout
from tests.distributed.train_command import command, run_command
from tests.hostile.mutations import changed_documents, mutants

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
    "run/divergences/11.json": (
        "stats {run} --iteration 11",
        "plan {run}/problems/11.json --granularity gemm",
    ),
    "run/health/11.json": ("stats {run} --iteration 11 --health", "stats {run} --csv"),
    "run/plans/11.json": (
        "export {file} --to yaml --output {new}",
        "export {file} --to te-precision --capability 10.0 --nearest --output {new}",
        "export {file} --to torchtitan --nearest --output {new}",
        "export {file} --to modelopt --nearest --output {new}",
        "plan {run}/problems/11.json --previous {file} --change-penalty 0.1",
    ),
    "precision.yaml": ("import {file} --problem {run}/problems/11.json --output {new}",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run` and `precision.yaml`."""
    folder = tmp_path_factory.mktemp("inputs")
    words = command(folder / "run", **SETTINGS)
    done = run_command(words, folder)
    assert done.returncode == 0, done.stderr
    export = "export {}/run/plans/11.json --capability 10.0 --nearest --output {}/precision.yaml"
    assert main(export.format(folder, folder).split()) == 0
    return folder


def timed_answer(words: list[str]) -> tuple[int, str, float]:
    """Return what `answer` returns, and the seconds of CPU that it took."""
    begin = time.process_time()
    status, output = answer(words)
    return status, output, time.process_time() - begin


def cases() -> Iterator[tuple[str, str]]:
    for name, commands in COMMANDS.items():
        for words in commands:
            yield name, words


@pytest.mark.parametrize(("name", "words"), [pytest.param(*case, id=case[1]) for case in cases()])
def test_an_answer_is_one_line_or_success(
    name: str, words: str, folder: Path, tmp_path: Path
) -> None:
    path = folder / name
    good = path.read_bytes()
    places = {"run": folder / "run", "file": path}
    places |= {"yaml": folder / "precision.yaml", "new": tmp_path / "new"}
    out = f"--problem {path} --output {tmp_path / 'new'}"
    line = words.format(**places, out=out).split()
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
        status, output, seconds = timed_answer(line)
        assert status == 0 or (status == 2 and output.count("\n") == 1), output[-2000:]
        limit_s = CPU_S + usual_s
        if seconds >= limit_s:  # is the machine slower than it was? Its load counts as CPU time
            path.write_bytes(good)
            _, _, now_s = timed_answer(line)
            path.write_bytes(content + b"\n")
            _, _, seconds = timed_answer(line)
            limit_s *= max(1.0, now_s / usual_s)
        assert seconds < limit_s, f"{seconds} s of CPU, allowed {limit_s}: {output[-200:]}"

    warnings.simplefilter("ignore")  # as in a rank; Megatron warns of its own settings
    try:
        answer(line)  # imports
        _, _, usual_s = timed_answer(line)  # a report draws its figures
        one()
    finally:
        path.write_bytes(good)


def test_a_checkpoints_state_is_refused_in_one_line_or_trains_on() -> None:
    """A state of which one value or key is another, through torch's file and a controller."""
    (found,) = run_ranks(1, "tests.nightly.inputs:states")
    assert found["tracebacks"] == []
    assert found["refused"] > 0 and found["trained"] > 0
    assert not any("\n" in text or len(text) > LONGEST for text in found["texts"])


def states() -> dict[str, Any]:
    """On a rank: resume from hostile states and train two iterations.

    The state is written with a measurement done, a plan applied and watched, and a problem in
    flight.
    """
    found: dict[str, Any] = {"refused": 0, "trained": 0, "texts": set()}
    with layout({**NARROW, "num_layers": 1, "train_iters": 100_000}) as trainer:
        controller = trainer.controller(STATE_SNIP, InProcess())
        trainer.advance(7, controller)
        good = controller.state(7).to_dict()
        assert None not in (good["solve"], good["guard"], good["observations"])
        controller.close()
        del trainer.tracebacks[:]

        @settings(
            max_examples=400,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(text=changed_documents(good))
        def one(text: str) -> None:
            try:
                value = saved_and_loaded(json.loads(text))
            except (ValueError, UnicodeEncodeError):
                return  # nothing that a checkpoint can hold
            trainer.step = 7
            try:
                state, _ = resumed_state(value, 7)
                controller = trainer.controller(STATE_SNIP, InProcess(), state)
            except SnipError as error:
                found["refused"] += 1
                found["texts"].add(shown(error))
                return
            trainer.advance(3, controller)
            controller.close()
            found["trained"] += 1

        one()
        return {**found, "texts": sorted(found["texts"]), "tracebacks": trainer.tracebacks}


STATE_SNIP = {"interval": 4, "start_step": 2, "lag": 2, "efficiency_target": 0.5}
"""Refreshes at 2 and 6; their plans are due before iterations 4 and 8."""


class InProcess:
    """Solves where it is asked, without a process."""

    def submit(self, *request: Any) -> None:
        self._request = request

    def result(self, timeout_s: float) -> PrecisionPlan:
        return make_plan(*self._request)

    def close(self) -> None:
        pass


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
