"""The command of the embedded trainer on two ranks: its files, its errors, and signals."""

from __future__ import annotations

import json
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

from megatron_snip.trainer.launch import ANSWER_S, SAVED_AND_STOPPED
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
def test_a_crash_shows_the_traceback_of_the_first_failing_rank(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASH_ON_RANK_1)
    done = run_command(command(tmp_path / "run"), tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "ArithmeticError: the reason why" in done.stderr
    assert done.stderr.splitlines()[-1] == "megatron-snip: training crashed; see above"


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
    assert done.returncode == 1 and done.stderr.count("\n") == 1
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


# ---- signals ----------------------------------------------------------------------------------


@contextmanager
def training(words: list[str], folder: Path, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has begun to train."""
    front = subprocess.Popen(
        words,
        env=environment(folder, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
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


def processes_of(front: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(front.pid).children(recursive=True)


def rank_of(processes: list[psutil.Process], number: int) -> psutil.Process:
    return next(p for p in processes if p.environ().get("RANK") == str(number))


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, TIMEOUT_S)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])  # ranks handle no SIGHUP
def test_ranks_listen_on_the_loopback_interface_only_and_end_by_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    with training(command(tmp_path / "run", train_iters=5000), tmp_path) as front:
        processes = [psutil.Process(front.pid), *processes_of(front)]
        connections = [c for p in processes for c in p.net_connections("tcp")]
        addresses = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"}
        front.send_signal(number)
        _, errors = front.communicate(timeout=TIMEOUT_S)
    assert front.returncode == 128 + number
    assert errors == f"megatron-snip: ended by {number.name}\n"
    assert_all_gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_is_named(tmp_path: Path, number: int) -> None:
    with training(command(tmp_path / "run", train_iters=5000), tmp_path) as front:
        processes = processes_of(front)
        rank_of(processes, number).kill()
        _, errors = front.communicate(timeout=TIMEOUT_S)
    assert (front.returncode, errors) == (1, f"megatron-snip: rank {number} ended by SIGKILL\n")
    assert_all_gone(processes)


@pytest.mark.slow
def test_a_killed_launcher_ends_its_ranks(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = command(tmp_path / "run", train_iters=5000)
    with training(words, tmp_path, TMPDIR=str(temporary)) as front:
        processes = processes_of(front)
        front.kill()
        assert_all_gone(processes)
    assert not list(temporary.glob("megatron-snip*"))


@pytest.mark.slow
@pytest.mark.parametrize(("save", "interrupts"), [(False, 1), (True, 1), (True, 2)])
def test_a_stopped_rank_does_not_hold_up_the_end(
    tmp_path: Path, save: bool, interrupts: int
) -> None:
    """A second interrupt ends the run at once."""
    values = {"save": str(tmp_path / "checkpoints")} if save else {}
    with training(command(tmp_path / "run", train_iters=5000, **values), tmp_path) as front:
        processes = processes_of(front)
        rank_of(processes, 1).suspend()
        begin = time.monotonic()
        for _ in range(interrupts):
            front.send_signal(signal.SIGINT)
            time.sleep(1)
        _, errors = front.communicate(timeout=TIMEOUT_S)
    assert front.returncode == 128 + signal.SIGINT
    if interrupts == 1:
        assert time.monotonic() - begin > ANSWER_S
        text = "" if save else "; without --save nothing can be resumed"
        assert errors == f"megatron-snip: ended by SIGINT; no answer from rank 1{text}\n"
    assert_all_gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "while_saving"),
    [
        (signal.SIGTERM, False),
        (signal.SIGINT, False),
        (signal.SIGHUP, False),
        (signal.SIGTERM, True),
    ],
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
        processes = processes_of(front)
        while while_saving and not list(Path(save).glob(".iter_*.partial/*.distcp")):
            assert front.poll() is None
            time.sleep(0.01)
        front.send_signal(number)
        output, errors = front.communicate(timeout=TIMEOUT_S)
    assert (front.returncode, errors) == (SAVED_AND_STOPPED, "")
    assert f"stopped by {number.name}" in output and f"--load {save}" in output
    assert "in the last evaluation" in output  # none came after the last iteration
    assert_all_gone(processes)
    again = run_command(words, tmp_path, OMP_NUM_THREADS="1")
    assert (again.returncode, again.stderr) == (0, "")
    before, after = (read_rows(tmp_path / name / "run") for name in "ab")
    assert [(r["iteration"], r["loss"]) for r in after] == [
        (r["iteration"], r["loss"]) for r in before
    ]
