"""The command of the embedded trainer on two ranks: its files, its errors, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from tests.distributed.launch import TIMEOUT_S
from tests.distributed.train_command import command, environment, read_rows, run_command


def test_one_command_trains_on_two_ranks_and_writes_the_run(tmp_path: Path) -> None:
    """It imports nothing from the folder where it is given, in which there is a yaml.py."""
    run_dir = tmp_path / "run"
    here = tmp_path / "here"
    here.mkdir()
    (here / "yaml.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    words = [*command(run_dir), "--train-iters", "4", "--lr", "1e-2"]
    words.insert(1, "-P")  # as the command of an installation, whose own folder is first
    done = run_command(words, tmp_path, cwd=here)
    assert not (tmp_path / "imported").exists()
    assert (done.returncode, done.stderr) == (0, "")
    assert "validation loss" in done.stdout
    assert done.stdout.endswith(f"next: megatron-snip report {run_dir}\n")
    rows = read_rows(run_dir)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert [row["iteration"] for row in rows if "validation_loss" in row] == [1, 2, 4]
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "lowest_precision_fraction"} <= set(rows[0])
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (settings["train_iters"], settings["tensor_model_parallel_size"]) == (4, 2)
    assert len(json.loads((run_dir / "data.json").read_text())["sha256"]) == 64
    assert "megatron-core" in json.loads((run_dir / "versions.json").read_text())


CRASH_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    import megatron_snip.trainer.loop as loop
    def train_step(*args):
        raise ArithmeticError("the reason why")
    loop.train_step = train_step
"""
NAN_AT_3 = """
import os
if "RANK" in os.environ:
    import megatron_snip.trainer.loop as loop
    mean_loss = loop.mean_loss
    calls = []
    def nan_loss(reports):
        calls.append(mean_loss(reports))
        return float("nan") if len(calls) == 3 else calls[-1]
    loop.mean_loss = nan_loss
"""


@pytest.mark.slow
def test_a_crash_shows_the_traceback_of_the_failing_rank(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASH_ON_RANK_1)
    done = run_command(command(tmp_path / "run"), tmp_path)
    assert done.returncode == 1
    assert "ArithmeticError: the reason why" in done.stderr


def test_input_that_a_rank_refuses_is_one_line(tmp_path: Path) -> None:
    words = command(tmp_path / "run", load=str(tmp_path / "none"))
    done = run_command(words, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    line = "megatron-snip: error: load '.*none' holds no checkpoint;.*\n"
    assert re.fullmatch(line, done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_nan_loss_ends_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NAN_AT_3)
    save = tmp_path / "checkpoints"
    values = {"save": str(save), "save_interval": 1, "eval_iters": 0, "train_iters": 5}
    done = run_command(command(tmp_path / "run", **values), tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "iteration 3: the loss is nan; the run ends" in done.stderr
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2\n"


@pytest.mark.slow
def test_training_outlives_its_output(tmp_path: Path) -> None:
    """As in `megatron-snip train 2>&1 | head -1`; see also tests/unit/test_output.py."""
    front = subprocess.Popen(
        command(tmp_path / "run", train_iters=5, tensor_model_parallel_size=1),
        env=environment(tmp_path, PYTHONWARNINGS="ignore"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert front.stdout is not None
    assert "iteration" in front.stdout.readline()
    front.stdout.close()
    assert front.wait(TIMEOUT_S) == 0
    assert len(read_rows(tmp_path / "run")) == 5


def test_a_damaged_index_of_an_earlier_run_is_made_anew(tmp_path: Path) -> None:
    """A full disk or a kill leaves an index that Megatron takes without a look at it."""
    words = command(tmp_path / "run", tensor_model_parallel_size=1, train_iters=2, eval_iters=0)
    first = run_command(words, tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    losses = [row["loss"] for row in read_rows(tmp_path / "run")]
    indices = sorted((tmp_path / "run" / "data_index").glob("*.npy"))
    assert len(indices) >= 3
    os.truncate(indices[0], 0)
    for index in indices[1:]:
        index.write_bytes(bytes(index.stat().st_size))
    again = run_command([*words, "--overwrite"], tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert [row["loss"] for row in read_rows(tmp_path / "run")] == losses


# ---- signals ----------------------------------------------------------------------------------


@contextmanager
def training(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that has begun to train."""
    front = subprocess.Popen(
        words,
        env=environment(folder, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        assert front.stdout is not None
        while "iteration" not in front.stdout.readline():
            assert front.poll() is None and time.monotonic() < deadline
        yield front
    finally:
        front.kill()
        front.wait()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    with training(command(tmp_path / "run", train_iters=5000), tmp_path) as front:
        processes = psutil.Process(front.pid).children(recursive=True)
        next(p for p in processes if p.environ().get("RANK") == "1").kill()
        _, errors = front.communicate(timeout=TIMEOUT_S)
    assert front.returncode == 1
    assert "megatron-snip: rank 1 ended by signal 9" in errors
    assert not psutil.wait_procs(processes, TIMEOUT_S)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "while_saving"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)],
)
def test_a_signal_saves_and_the_same_command_resumes(
    tmp_path: Path, number: signal.Signals, while_saving: bool
) -> None:
    values = {
        "tensor_model_parallel_size": 1,
        "global_batch_size": 1,
        "hidden_dropout": 0.1,
        "eval_iters": 1,
        "eval_interval": 60,
        "train_iters": 60,
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    done = run_command(command(tmp_path / "a" / "run", **values), tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    save = str(tmp_path / "b" / "checkpoints")
    words = command(tmp_path / "b" / "run", **values, save=save, load=save, save_interval=2)
    with training(words, tmp_path) as front:
        while while_saving and not list(Path(save).glob("iter_*/*.distcp")):
            assert front.poll() is None
            time.sleep(0.01)
        front.send_signal(number)
        output, errors = front.communicate(timeout=TIMEOUT_S)
    assert front.returncode == 128 + number
    assert errors == f"megatron-snip: ended by {number.name}\n"
    assert f"stopped by {number.name}" in output and f"--load {save}" in output
    assert "in the last evaluation" in output  # none came after the last iteration
    again = run_command(words, tmp_path, OMP_NUM_THREADS="1")
    assert (again.returncode, again.stderr) == (0, "")
    before, after = (read_rows(tmp_path / name / "run") for name in "ab")
    assert [(r["iteration"], r["loss"]) for r in after] == [
        (r["iteration"], r["loss"]) for r in before
    ]
