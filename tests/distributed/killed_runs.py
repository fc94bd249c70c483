"""Runs of `megatron-snip train` that are killed at random moments and started again."""

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from megatron_snip.planning.plan import read_plan
from tests.distributed.launch import TIMEOUT_S
from tests.distributed.train_command import command, environment, read_rows, run_command

STEPS = 22
SETTINGS: dict[str, Any] = {
    "global_batch_size": 2,
    "hidden_dropout": 0.1,
    "eval_iters": 0,
    "train_iters": STEPS,
    "snip": {"enabled": True, "start_step": 11, "interval": 4, "lag": 3, "efficiency_target": 0.5},
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def run_uninterrupted(folder: Path, ranks: int) -> dict[str, Any]:
    """Run to the end; return the result."""
    (folder / "uninterrupted").mkdir()
    run_dir = folder / "uninterrupted" / "run"
    words = command(run_dir, **SETTINGS, tensor_model_parallel_size=ranks)
    return _complete(words, run_dir, folder)


def run_killed(folder: Path, seed: int, ranks: int, kills: int | None = None) -> dict[str, Any]:
    """Run, kill, run again to the end; return the result, and the lines written at each kill."""
    dice = random.Random(seed)
    place = folder / f"killed-{seed}"
    place.mkdir()
    save = str(place / "checkpoints")
    settings = {**SETTINGS, "tensor_model_parallel_size": ranks}
    words = command(place / "run", **settings, save=save, load=save, save_interval=2)
    killed_at = []
    for _ in range(dice.randint(1, 3) if kills is None else kills):
        before = _state(place / "run")
        with _started(words, folder) as front:
            # One in five dies while it starts. A resumed run may make some iterations again first.
            if dice.random() < 0.2:
                time.sleep(dice.uniform(0.0, 5.0))
            else:
                least = max(1, before[0] - 2)
                _wait(front, place / "run", before, dice.randint(least, STEPS - 2))
                time.sleep(dice.uniform(0.0, 0.2))
            killed = front.poll() is None
        if killed:
            killed_at.append(_state(place / "run")[0])
    return {**_complete(words, place / "run", folder), "killed_at": killed_at}


def _complete(words: list[str], run_dir: Path, folder: Path) -> dict[str, Any]:
    """Run to the end; return what two runs must have in common."""
    done = run_command(words, folder, **ONE_THREAD)
    assert done.returncode == 0, done.stderr[-2000:]
    plans = {p.stem: read_plan(p).digest for p in sorted((run_dir / "plans").glob("*.json"))}
    kept = ("iteration", "loss", "grad_norm", "lr", "lowest_precision_fraction", "plan_iteration")
    return {"rows": [{k: row.get(k) for k in kept} for row in read_rows(run_dir)], "plans": plans}


@contextmanager
def _started(words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that is killed at the end of the block, all of it and without notice."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    front = subprocess.Popen(words, env=environment(folder, **ONE_THREAD), **streams)
    try:
        yield front
    finally:
        family = []
        if front.poll() is None:
            parent = psutil.Process(front.pid)
            family = [*parent.children(recursive=True), parent]
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=30)
        front.wait(30)


def _wait(
    front: subprocess.Popen[bytes], run_dir: Path, before: tuple[int, int], lines: int
) -> None:
    """Wait until this run has written, and so many steps are there; or until it has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while front.poll() is None:
        now = _state(run_dir)
        if now != before and now[0] >= lines:
            return
        if time.monotonic() > deadline:
            raise AssertionError("the run does not train")
        time.sleep(0.01)


def _state(run_dir: Path) -> tuple[int, int]:
    """Return the iterations written, and when the last one was."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return 0, 0
    return metrics.read_bytes().count(b"\n"), metrics.stat().st_mtime_ns
