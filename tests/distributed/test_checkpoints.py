"""A resumed run is bitwise the run that never stopped.

Runs share one launch, because starting ranks takes longer than training them.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.planning.plan import read_plan
from megatron_snip.trainer.checkpoint import checkpoint_path
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import EP2, OVERLAP, PP2, SP, TP2, VPP, names, selected
from tests.distributed.test_trainer import (
    DROPOUT,
    TINY,
    assert_same_training,
    command,
    run_command,
)

ITERATIONS = 6
STOP = 3

SNIP = {"enabled": True, "start_step": 3, "interval": 3, "lag": 2, "efficiency_target": 0.5}
"""Measures in iterations 3 and 6; the checkpoint after 3 holds a pending solve."""

EXPERTS = {"num_experts": 4, **EP2}
ETP1 = {"expert_tensor_parallel_size": 1}
SHARDED_FP32 = {**OVERLAP, "bf16": False}

SAME_LAYOUT: dict[str, dict[str, Any]] = {
    "tp2 snip": {**TP2, **DROPOUT, "snip": SNIP},
    "pp2 interleaved, sharded": {**VPP, **DROPOUT, **OVERLAP},
    "ep2 sharded": {**EXPERTS, **DROPOUT, **OVERLAP, "snip": SNIP},
}
OTHER_LAYOUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 to pp2": ({**TP2, "bf16": False}, {**PP2, "bf16": False}),
    "ep2 to tp2 ep2": ({**EXPERTS, "bf16": False}, {**EXPERTS, **TP2, **SP, **ETP1, "bf16": False}),
    "dp2 sharded to tp2": (SHARDED_FP32, {**SHARDED_FP32, **TP2}),
}

FAST = ["tp2 snip"]

Results = list[dict[str, dict[str, Any]]]


def runs_of(
    name: str, before: dict[str, Any], after: dict[str, Any], folder: Path
) -> dict[str, dict[str, Any]]:
    """Three runs: one never stops, one stops after STOP iterations, one resumes it."""
    base = {**TINY, "bf16": True, "train_iters": ITERATIONS}
    place = folder / name
    saving = {"run_dir": str(place / "run"), "save": str(place / "checkpoints")}
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
def two_ranks(request: pytest.FixtureRequest, folder: Path) -> Results:
    runs: dict[str, Any] = {}
    for name, layout in selected(request, SAME_LAYOUT).items():
        runs |= runs_of(name, layout, layout, folder)
    for name, (before, after) in selected(request, OTHER_LAYOUT).items():
        runs |= runs_of(name, before, after, folder)
    function = "tests.distributed.workers.checkpoints:run_all"
    return run_ranks(2, function, {"runs": runs})


@pytest.mark.parametrize("name", names(SAME_LAYOUT, FAST))
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(two_ranks: Results, name: str) -> None:
    for results in two_ranks:
        stopped = results[f"{name}: stopped"]  # by a signal to rank 1
        assert (stopped["iterations"], stopped["stopped"]) == (STOP, "SIGUSR1")
        assert results[f"{name}: resumed"] == results[name]
        assert [row["iteration"] for row in results[name]["metrics"]] == list(
            range(1, ITERATIONS + 1)
        )
        # Training changed the weights after the checkpoint.
        assert results[name]["weights"] != stopped["weights"]


@pytest.mark.parametrize("name", ["tp2 snip"])
def test_a_resumed_run_applies_the_plan_that_was_being_solved(
    two_ranks: Results, folder: Path, name: str
) -> None:
    rows = two_ranks[0][f"{name}: resumed"]["metrics"]
    assert [row["lowest_precision_fraction"] > 0 for row in rows] == [False] * 4 + [True] * 2
    complete, resumed = (read_plan(folder / name / f / "plans/3.json") for f in ("complete", "run"))
    assert resumed.digest == complete.digest


@pytest.mark.parametrize("name", names(OTHER_LAYOUT, FAST))
def test_another_layout_continues_with_the_same_model(two_ranks: Results, name: str) -> None:
    for results in two_ranks:
        assert_same_training(results[f"{name}: resumed"], results[name])


# ---- damaged checkpoints and full disks -------------------------------------------------------


def truncate(path: Path) -> str:
    file = next(path.glob("*.distcp"))
    os.truncate(file, 100)
    return file.name


def empty_metadata(path: Path) -> str:
    os.truncate(path / ".metadata", 0)
    return ".metadata"


def flip_a_bit(path: Path) -> str:
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file.name


DAMAGES: list[Callable[[Path], str]] = [truncate, empty_metadata, flip_a_bit]

FULL_DISK = """
import os
if "RANK" in os.environ:
    import errno
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException
    save, calls = dist_checkpointing.save, []
    def failing(content, folder):
        calls.append(save(content, folder))
        if len(calls) == 2:
            full = OSError(errno.ENOSPC, "No space left on device")
            rank = int(os.environ["RANK"])
            raise CheckpointException("write", {} if rank else {1: (full, None)})
    dist_checkpointing.save = failing
"""


@pytest.mark.slow
def test_damage_to_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    values = {"save": str(save), "save_interval": 1, "eval_iters": 0, "train_iters": 2}
    done = run_command(command(tmp_path / "run", **values), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    runs: dict[str, Any] = {}
    names = {}
    for damage in DAMAGES:
        copy = tmp_path / damage.__name__
        shutil.copytree(save, copy)
        names[damage.__name__] = damage(copy / "iter_0000002")
        run = {**TINY, **TP2, "bf16": True, "eval_iters": 0, "load": str(copy)}
        runs[damage.__name__] = {**run, "run_dir": str(tmp_path / "resumed" / damage.__name__)}
    previous = {**runs["truncate"], "ckpt_step": 1, "run_dir": str(tmp_path / "resumed" / "1")}
    function = "tests.distributed.workers.checkpoints:errors"
    results = run_ranks(2, function, {"runs": {**runs, "previous": previous}})
    for errors in results:
        assert errors.pop("previous") is None
        for name, (kind, message) in errors.items():
            assert kind == "UsageError" and "\n" not in message
            assert f"iter_0000002/{names[name]}' does not match the SHA-256" in message


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL_DISK)
    save = tmp_path / "checkpoints"
    values = {"save": str(save), "save_interval": 1, "eval_iters": 0, "train_iters": 3}
    done = run_command(command(tmp_path / "run", **values), tmp_path)
    assert done.returncode == 1
    path = checkpoint_path(save, 2)
    reason = f"OSError: [Errno {errno.ENOSPC}] No space left on device"
    assert done.stderr == f"megatron-snip: cannot save '{path}': {reason}\n"
    assert [p.name for p in save.iterdir() if p.is_dir()] == ["iter_0000001"]
    (tmp_path / "sitecustomize.py").unlink()
    resumed = run_command(command(tmp_path / "run", **values, load=str(save)), tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, "")
