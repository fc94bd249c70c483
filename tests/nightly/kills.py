"""kill -9 at random points of short runs; each resumes to the bits of an uninterrupted run.

    python -m tests.nightly.kills [--runs 40] [--seed 0] [--ranks 2]

Every process of a run is killed at once, at a random moment up to three times, while it trains,
measures, solves or saves (it saves after every second iteration); the same command is given again
until the run ends. The loss of every iteration, every plan and where it was applied are compared
with those of an uninterrupted run. Exit status 1 if anything differs.
"""

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from megatron_snip.planning.plan import read_plan
from tests.distributed.launch import TIMEOUT_S
from tests.distributed.test_trainer import command, environment, run_command

STEPS = 22
SETTINGS: dict[str, Any] = {
    "global_batch_size": 2,
    "hidden_dropout": 0.1,
    "eval_iters": 0,
    "train_iters": STEPS,
    "snip": {"enabled": True, "start_step": 11, "interval": 4, "lag": 3, "efficiency_target": 0.5},
}


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def settings(ranks: int) -> dict[str, Any]:
    return {**SETTINGS, "tensor_model_parallel_size": ranks}


def result(run_dir: Path) -> dict[str, Any]:
    """What two runs must have in common."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plans = {p.stem: read_plan(p).digest for p in sorted((run_dir / "plans").glob("*.json"))}
    kept = ("iteration", "loss", "grad_norm", "lr", "lowest_precision_fraction", "plan_iteration")
    return {"rows": [{k: row.get(k) for k in kept} for row in rows], "plans": plans}


def run_uninterrupted(folder: Path, ranks: int) -> dict[str, Any]:
    """Run to the end; return the result."""
    (folder / "uninterrupted").mkdir()
    run_dir = folder / "uninterrupted" / "run"
    return _complete(command(run_dir, **settings(ranks)), run_dir, folder)


def run_killed(folder: Path, seed: int, ranks: int, kills: int | None = None) -> dict[str, Any]:
    """Run, kill, run again to the end; return the result, and the lines written at each kill."""
    dice = random.Random(seed)
    place = folder / f"killed-{seed}"
    place.mkdir()
    save = str(place / "checkpoints")
    words = command(place / "run", **settings(ranks), save=save, load=save, save_interval=2)
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
    done = run_command(words, folder, **ONE_THREAD)
    assert done.returncode == 0, done.stderr[-2000:]
    return result(run_dir)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    tried = differ = 0
    with tempfile.TemporaryDirectory() as name:
        expected = run_uninterrupted(Path(name), args.ranks)
        for seed in itertools.count(args.seed):
            found = run_killed(Path(name), seed, args.ranks)
            shutil.rmtree(Path(name) / f"killed-{seed}")
            if iterations := found.pop("killed_at"):  # else it ended before
                tried, differ = tried + 1, differ + (found != expected)
                result = "same" if found == expected else "DIFFERENT"
                print(f"run {seed}: killed after {iterations} iterations: {result}", flush=True)
            if tried == args.runs:
                break
    print(f"{tried} runs, {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
