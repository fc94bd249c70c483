"""A resumed run is bitwise the run that never stopped."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_snip.errors import SnipError
from megatron_snip.planning.plan import read_plan
from megatron_snip.run import controller
from megatron_snip.trainer import session
from megatron_snip.trainer.checkpoint import POINTER, checkpoint_path, latest_iteration
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.model import (
    TrainingState,
    destroy_parallel_state,
    initialize_parallel_state,
)
from tests.distributed.damage import empty_metadata, truncate, without_scheduler
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import EP2, OVERLAP, SP, TP2, VPP, names
from tests.distributed.small_model import SolverHere, digest, prepare_rank
from tests.distributed.train_command import TINY, command, read_rows, run_command

RUN_ALL = "tests.distributed.test_checkpoints:run_all"
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

ITERATIONS = 6
STOP = 3

SNIP = {"enabled": True, "start_step": 3, "interval": 3, "lag": 2, "efficiency_target": 0.5}
"""Measures in iterations 3 and 6; the checkpoint after 3 holds a pending solve."""

EXPERTS = {"num_experts": 4, **EP2}
ETP1 = {"expert_tensor_parallel_size": 1}
SHARDED_FP32 = {**OVERLAP, "bf16": False}


def alike(**layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return layout, layout


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 snip": alike(**TP2, **DROPOUT, snip=SNIP),
    "pp2 interleaved, sharded": alike(**VPP, **DROPOUT, **OVERLAP),
    "ep2 sharded": alike(**EXPERTS, **DROPOUT, **OVERLAP, snip=SNIP),
    "tp2 to interleaved pp2": ({**TP2, "bf16": False}, {**VPP, "bf16": False}),
    "ep2 to tp2 ep2": ({**EXPERTS, "bf16": False}, {**EXPERTS, **TP2, **SP, **ETP1, "bf16": False}),
    "dp2 sharded to tp2": (SHARDED_FP32, {**SHARDED_FP32, **TP2}),
}
"""Of the run that stops, and of the one that resumes it."""

FAST = ["tp2 snip"]

Results = list[dict[str, dict[str, Any]]]


def run_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On ranks: run one after the other; return what each gave, or its error, by name."""
    prepare_rank()
    results = {}
    for name, values in runs.items():
        print("run", name, flush=True)
        stop = values.pop("stop", 0)
        try:
            results[name] = run_one(make_train_config(values), stop)
        except SnipError as error:
            results[name] = {"error": (type(error).__name__, str(error))}
        dist.barrier()
    return results


def run_one(config: TrainConfig, stop: int) -> dict[str, Any]:
    """One run, as `session.run_rank` makes it; in iteration `stop` the last rank gets a signal."""
    session.check_run(config, dist.get_world_size())
    dist.barrier()  # all have looked at the folders before one writes
    initialize_parallel_state(config)
    states: list[TrainingState] = []
    training = session.train

    def train(state: TrainingState, datasets: Any, hook: Any, *rest: Any) -> Any:
        states.append(state)
        forward_backward = hook.forward_backward

        def signalled(iteration: int, *arguments: Any, **kwargs: Any) -> Any:
            if iteration == stop and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            return forward_backward(iteration, *arguments, **kwargs)

        hook.forward_backward = signalled
        return training(state, datasets, hook, *rest)

    try:
        with (
            mock.patch.object(session, "train", train),
            mock.patch.object(controller, "SolverProcess", SolverHere),
        ):
            result = session.run_session(config, None)
    finally:
        destroy_parallel_state()
    dist.barrier()  # its files are complete
    timed = ("tokens_per_s", "step_s", "wall_s", "refresh_s", "wait_s")
    return {
        "iterations": result.iterations,
        "stopped": result.stopped,
        "first_validation_loss": result.first_validation_loss,
        "validation_loss": result.validation_loss,
        "weights": digest([p for chunk in states[0].model for p in chunk.parameters()]),
        "metrics": [
            {k: v for k, v in row.items() if k not in timed} for row in read_rows(config.run_dir)
        ],
    }


def runs_of(
    name: str, before: dict[str, Any], after: dict[str, Any], folder: Path
) -> dict[str, dict[str, Any]]:
    """Three runs: one never stops or saves, one stops after STOP iterations, one resumes it."""
    base = {**TINY, "bf16": True, "train_iters": ITERATIONS}
    place = folder / name
    saving = {"run_dir": str(place / "run"), "save": str(place / "checkpoints")}
    saving["save_interval"] = 2
    resuming = {**saving, "load": saving["save"]}
    return {
        name: {**base, **before, "run_dir": str(place / "complete")},
        f"{name}: stopped": {**base, **before, **saving, "stop": STOP},
        f"{name}: resumed": {**base, **after, **resuming},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Callable[[str], Results]:
    """What each rank returned in the runs of a pair of layouts."""
    return functools.cache(
        lambda name: run_ranks(2, RUN_ALL, {"runs": runs_of(name, *LAYOUTS[name], folder)})
    )


@pytest.mark.parametrize("name", names(LAYOUTS, FAST))
def test_a_resumed_run_is_the_run_that_never_stopped(
    two_ranks: Callable[[str], Results], name: str
) -> None:
    """Bit by bit in the same layout; in another one only the order of sums differs."""
    before, after = LAYOUTS[name]
    for results in two_ranks(name):
        complete, resumed = results[name], results[f"{name}: resumed"]
        stopped = results[f"{name}: stopped"]  # by a signal to rank 1
        assert (stopped["iterations"], stopped["stopped"]) == (STOP, "SIGUSR1")
        iterations = [row["iteration"] for row in complete["metrics"]]
        assert iterations == list(range(1, ITERATIONS + 1))
        # Training changed the weights after the checkpoint.
        assert complete["weights"] != stopped["weights"]
        if before == after:
            assert resumed == complete
        for key, tolerance in (("loss", 2e-6), ("grad_norm", 1e-4)):
            found, wanted = ([row[key] for row in run["metrics"]] for run in (resumed, complete))
            assert found == pytest.approx(wanted, rel=tolerance)
        for key in ("first_validation_loss", "validation_loss"):
            assert resumed[key] == pytest.approx(complete[key], rel=2e-6)


@pytest.mark.parametrize("name", ["tp2 snip"])
def test_a_resumed_run_applies_the_plan_that_was_being_solved(
    two_ranks: Callable[[str], Results], folder: Path, name: str
) -> None:
    rows = two_ranks(name)[0][f"{name}: resumed"]["metrics"]
    assert [row["lowest_precision_fraction"] > 0 for row in rows] == [False] * 4 + [True] * 2
    complete, resumed = (read_plan(folder / name / f / "plans/3.json") for f in ("complete", "run"))
    assert resumed.digest == complete.digest


def test_a_run_that_is_refused_leaves_the_run_before_as_it_was(tmp_path: Path) -> None:
    """It would replace that run, or continue it from a damaged checkpoint."""
    run = {**TINY, **TP2, "bf16": True, "eval_iters": 0, "run_dir": str(tmp_path / "run")}
    save = tmp_path / "checkpoints"
    saving = {"save": str(save), "save_interval": 1, "train_iters": 2}
    run_ranks(2, RUN_ALL, {"runs": {"before": {**run, **saving, "snip": SNIP}}})
    empty_metadata(checkpoint_path(save, 2))
    kept = contents(tmp_path)
    refused = {
        "replaces": {**run, "overwrite": True, "snip": {**SNIP, "pins": ["nowhere.*=bf16"]}},
        "damaged": {**run, **saving, "load": str(save), "snip": SNIP},
    }
    for results in run_ranks(2, RUN_ALL, {"runs": refused}):
        errors = {name: result["error"][1] for name, result in results.items()}
        assert "nowhere" in errors["replaces"]
        assert "cannot load" in errors["damaged"]
    assert contents(tmp_path) == kept


def test_a_killed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """What it has written of a later one is written over. The folder has two spellings."""
    save = tmp_path / "checkpoints"
    run = {**TINY, **TP2, "bf16": True, "eval_iters": 0, "run_dir": str(tmp_path / "run")}
    run |= {"save": str(save), "load": str(tmp_path / "run" / ".." / "checkpoints")}
    run |= {"save_interval": 1, "hidden_dropout": 0.1}
    run_ranks(2, RUN_ALL, {"runs": {"four": {**run, "train_iters": 4}}})
    complete = read_rows(tmp_path / "run")
    truncate(checkpoint_path(save, 3))
    (save / POINTER).write_text("2\n")
    (save / "iter_0000004" / "common.pt").unlink()
    for results in run_ranks(2, RUN_ALL, {"runs": {"again": {**run, "train_iters": 4}}}):
        assert results["again"]["iterations"] == 4
    again = read_rows(tmp_path / "run")
    assert [row["loss"] for row in again] == [row["loss"] for row in complete]
    assert latest_iteration(save) == 4


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file's bytes but for Megatron's cache of samples, which any run may add to."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.parent.name != "data_index"}


# ---- damaged checkpoints and full disks -------------------------------------------------------


DAMAGES: list[Callable[[Path], str]] = [truncate, empty_metadata, without_scheduler]

FULL_DISK = """
import os
if "RANK" in os.environ:
    import errno
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException
    full = OSError(errno.ENOSPC, "No space left on device")
    failures = {1: (full, None)} if os.environ["RANK"] == "0" else {}
    original, calls = dist_checkpointing.save, []
    def failing(*arguments):
        calls.append(original(*arguments))
        if len(calls) == 2:
            raise CheckpointException("write", failures)
    dist_checkpointing.save = failing
"""
"""The second checkpoint finds the disk full."""


@pytest.mark.slow
def test_damage_to_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    values = {"save": str(save), "save_interval": 1, "eval_iters": 0, "train_iters": 2}
    done = run_command(command(tmp_path / "run", **values), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    runs: dict[str, Any] = {}
    for damage in DAMAGES:
        copy = tmp_path / damage.__name__
        shutil.copytree(save, copy)
        damage(copy / "iter_0000002")
        run = {**TINY, **TP2, "bf16": True, "eval_iters": 0, "load": str(copy)}
        runs[damage.__name__] = {**run, "run_dir": str(tmp_path / "resumed" / damage.__name__)}
    for results in run_ranks(2, RUN_ALL, {"runs": runs}):
        for result in results.values():
            _, message = result["error"]
            assert "\n" not in message
            assert "iter_0000002': " in message and message.startswith("cannot load")


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL_DISK)
    save = tmp_path / "checkpoints"
    values = {"save": str(save), "save_interval": 1, "eval_iters": 0, "train_iters": 3}
    done = run_command(command(tmp_path / "run", **values), tmp_path)
    assert done.returncode == 1
    reason = f"cannot save '{checkpoint_path(save, 2)}': OSError: [Errno 28] No space left on"
    assert f"megatron-snip: {reason}" in done.stderr
    assert latest_iteration(save) == 1
    (tmp_path / "sitecustomize.py").unlink()
    resumed = run_command(command(tmp_path / "run", **values, load=str(save)), tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, "")
