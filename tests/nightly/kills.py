"""kill -9 at random points of short runs; each goes on to the bitwise result of the run left alone.

    python -m tests.nightly.kills [--runs 40] [--seed 0] [--ranks 2] [--output FILE]

Every process of a run is killed at once, at a random moment up to three times, while it trains,
measures, solves or saves (it saves after every second step); the same command is given again until
the run ends. Compared with a run that nobody disturbed: the loss of every step, every plan, and
which plan was in force when. Exit status 1 if anything differs. FILE keeps where each was killed
and what became of it; it is written after every run.
"""

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
from tests.distributed.test_trainer import command, environment
from tests.nightly.results import parser, save

STEPS = 22
SETTINGS: dict[str, Any] = {
    "global_batch_size": 2,
    "hidden_dropout": 0.1,
    "eval_iters": 0,
    "train_iters": STEPS,
    "snip": {"enabled": True, "start_step": 11, "interval": 4, "lag": 3, "efficiency_target": 0.5},
}


def settings(ranks: int) -> dict[str, Any]:
    return {**SETTINGS, "tensor_model_parallel_size": ranks}


def result(run_dir: Path) -> dict[str, Any]:
    """What two runs must have in common."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plans = {p.stem: read_plan(p).digest for p in sorted((run_dir / "plans").glob("*.json"))}
    kept = ("iteration", "loss", "grad_norm", "lr", "lowest_precision_fraction", "plan_iteration")
    return {"rows": [{k: row.get(k) for k in kept} for row in rows], "plans": plans}


def undisturbed(folder: Path, ranks: int) -> dict[str, Any]:
    """Run to the end; return the result."""
    (folder / "undisturbed").mkdir()
    words = command(folder / "undisturbed" / "run", **settings(ranks))
    subprocess.run(
        words, env=_environment(folder), check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return result(folder / "undisturbed" / "run")


def disturbed(folder: Path, seed: int, ranks: int, kills: int | None = None) -> dict[str, Any]:
    """Run, kill, run again to the end; return the result, and the lines written at each kill."""
    dice = random.Random(seed)
    place = folder / f"killed-{seed}"
    place.mkdir()
    save = str(place / "checkpoints")
    words = command(place / "run", **settings(ranks), save=save, load=save, save_interval=2)
    killed_at = []
    for _ in range(dice.randint(1, 3) if kills is None else kills):
        before = _state(place / "run")
        with _started(words, _environment(folder)) as front:
            # One in five dies while it starts. A run that goes on may make some steps again first.
            if dice.random() < 0.2:
                time.sleep(dice.uniform(0.0, 5.0))
            else:
                least = max(1, before[0] - 2)
                _wait(front, place / "run", before, dice.randint(least, STEPS - 2))
                time.sleep(dice.uniform(0.0, 0.2))
            killed = front.poll() is None
        if killed:
            killed_at.append(_lines(place / "run"))
    again = subprocess.run(
        words, env=_environment(folder), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if again.returncode != 0:
        raise AssertionError(f"seed {seed}: the run did not go on: {again.stderr[-2000:]}")
    return {**result(place / "run"), "killed_at": killed_at}


@contextmanager
def _started(words: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run that is killed at the end of the block, all of it and without notice."""
    front = subprocess.Popen(
        words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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
    """Steps written, and when the last one was."""
    metrics = run_dir / "metrics.jsonl"
    return _lines(run_dir), metrics.stat().st_mtime_ns if metrics.exists() else 0


def _lines(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _environment(folder: Path) -> dict[str, str]:
    return environment(folder, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=40)
    flags.add_argument("--seed", type=int, default=0, help="of the first run")
    flags.add_argument("--ranks", type=int, default=2)
    args = flags.parse_args()
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = undisturbed(folder, args.ranks)
        seed = args.seed - 1
        while len(rows) < args.runs:
            seed += 1
            found = disturbed(folder, seed, args.ranks)
            killed = found.pop("killed_at")
            shutil.rmtree(folder / f"killed-{seed}")
            if not killed:  # it was through before
                continue
            same = found == expected
            rows.append({"seed": seed, "killed_after_steps": killed, "same": same})
            print(f"run {seed}: killed after {killed} steps: {'same' if same else 'DIFFERENT'}")
            sys.stdout.flush()
            save(args.output, f"gloo, {args.ranks} ranks", _record(expected, rows, begin))
    failures = sum(not row["same"] for row in rows)
    print(f"{args.runs} runs, {failures} differ")
    return 1 if failures else 0


def _record(expected: dict[str, Any], rows: list[dict[str, Any]], begin: float) -> dict[str, Any]:
    return {
        "steps": STEPS,
        "plans": len(expected["plans"]),
        "runs": len(rows),
        "kills": sum(len(row["killed_after_steps"]) for row in rows),
        "differ": sum(not row["same"] for row in rows),
        "seconds": round(time.monotonic() - begin),
        "each": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
