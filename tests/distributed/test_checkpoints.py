"""A run that stops and goes on is bitwise the run that never stopped.

Runs share one launch, because starting ranks takes longer than training them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.trainer.launch import SAVED_AND_STOPPED
from tests.distributed.launch import run_ranks
from tests.distributed.test_trainer import (
    DROPOUT,
    OVERLAP,
    PP2,
    SP,
    TINY,
    TP2,
    VPP,
    assert_same_training,
    command,
    environment,
)

STEPS = 6
STOP = 3

SNIP = {"enabled": True, "start_step": 2, "interval": 3, "lag": 2, "efficiency_target": 0.5}
"""Measures at steps 2 and 5, applies before step 4: a checkpoint after 3 holds an open problem."""

EP2 = {"num_experts": 4, "expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
RESHARDABLE = {**OVERLAP, "dist_ckpt_optim_fully_reshardable": True, "bf16": False}

SAME_LAYOUT: dict[str, dict[str, Any]] = {
    "tp2 snip": {**TP2, **DROPOUT, "snip": SNIP},
    "pp2": {**PP2, **DROPOUT},
    "pp2 interleaved, sharded": {**VPP, **DROPOUT, **OVERLAP},
    "dp2 sharded, reshardable": {**RESHARDABLE, **DROPOUT, "bf16": True},
    "ep2 sharded": {**EP2, **DROPOUT, **OVERLAP, "snip": SNIP},
}
OTHER_LAYOUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 to pp2": ({**TP2, "bf16": False}, {**PP2, "bf16": False}),
    "ep2 to tp2 ep2": ({**EP2, "bf16": False}, {**EP2, **TP2, **SP, **ETP1, "bf16": False}),
    "dp2 sharded to tp2": (RESHARDABLE, {**RESHARDABLE, **TP2}),
}

Results = list[dict[str, dict[str, Any]]]


def runs_of(
    name: str, before: dict[str, Any], after: dict[str, Any], folder: Path
) -> dict[str, dict[str, Any]]:
    """Three runs: one that never stops, one that stops after STOP steps, and one that goes on."""
    base = {**TINY, "bf16": True, "train_iters": STEPS, "data_cache_path": str(folder / "data")}
    place = folder / name
    saving = {"run_dir": str(place / "run"), "save": str(place / "checkpoints")}
    going_on = {**saving, "load": saving["save"]}
    return {
        name: {**base, **before, "run_dir": str(place / "whole")},
        f"{name}: stopped": {**base, **before, **saving, "exit_interval": STOP},
        f"{name}: resumed": {**base, **after, **going_on},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Results:
    runs: dict[str, Any] = {}
    for name, layout in SAME_LAYOUT.items():
        runs |= runs_of(name, layout, layout, folder)
    for name, (before, after) in OTHER_LAYOUT.items():
        runs |= runs_of(name, before, after, folder)
    function = "tests.distributed.workers.checkpoints:run_all"
    return run_ranks(2, function, {"runs": runs}, timeout_s=280)


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(two_ranks: Results, name: str) -> None:
    for results in two_ranks:
        stopped = results[f"{name}: stopped"]
        assert (stopped["steps"], stopped["stopped"]) == (STOP, "exit_interval")
        assert results[f"{name}: resumed"] == results[name]
        assert [row["step"] for row in results[name]["metrics"]] == list(range(STEPS))
        # Training went on after the checkpoint: equality is not that of standing still.
        assert results[name]["weights"] != stopped["weights"]


def test_a_plan_that_was_being_solved_is_applied_by_the_resumed_run(
    two_ranks: Results, folder: Path
) -> None:
    rows = two_ranks[0]["tp2 snip: resumed"]["metrics"]
    assert [row["lowest_precision_fraction"] > 0 for row in rows] == [False] * 4 + [True] * 2
    whole, run = (folder / "tp2 snip" / name / "plans" / "2.json" for name in ("whole", "run"))
    plans = [json.loads(path.read_text()) for path in (whole, run)]
    for plan in plans:
        plan.pop("seconds")
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", OTHER_LAYOUT)
def test_another_layout_goes_on_with_the_same_model(two_ranks: Results, name: str) -> None:
    for results in two_ranks:
        whole, resumed = results[name], results[f"{name}: resumed"]
        for result in (whole, resumed):
            for key in ("loss", "grad_norm"):
                result[key + ("es" if key == "loss" else "s")] = [r[key] for r in result["metrics"]]
        assert_same_training(resumed, whole)


def test_a_signal_to_one_rank_stops_all_after_the_step(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    values = {**TINY, **TP2, "run_dir": str(tmp_path / "run"), "save": str(save)}
    arguments = {"values": values, "number": int(signal.SIGUSR1), "rank": 1}
    function = "tests.distributed.workers.checkpoints:signal_one_rank"
    results = run_ranks(2, function, arguments)
    for result in results:
        assert (result["steps"], result["stopped"], result["handler"]) == (2, "SIGUSR1", True)
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert (save / "iter_0000002" / "run.json").is_file()


def test_the_command_saves_on_sigterm_and_the_same_command_goes_on(tmp_path: Path) -> None:
    settings = {
        "tensor_model_parallel_size": 1,
        "global_batch_size": 1,
        "hidden_dropout": 0.1,
        "eval_iters": 0,
        "train_iters": 60,
    }
    environ = environment(tmp_path, OMP_NUM_THREADS="1")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = command(tmp_path / "a" / "run", **settings)
    subprocess.run(whole, env=environ, check=True, capture_output=True, timeout=240)
    save = str(tmp_path / "b" / "checkpoints")
    words = command(tmp_path / "b" / "run", **settings, save=save, load=save)
    front = subprocess.Popen(
        words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 90
        assert front.stdout is not None
        while "step" not in front.stdout.readline():  # the rank trains
            assert front.poll() is None and time.monotonic() < deadline
        front.send_signal(signal.SIGTERM)
        printed, said = front.communicate(timeout=90)
    finally:
        front.kill()
    assert (front.returncode, said) == (SAVED_AND_STOPPED, "")
    assert "stopped by SIGTERM" in printed and f"--load {save}" in printed
    again = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stderr) == (0, "")
    assert losses(tmp_path / "b" / "run") == losses(tmp_path / "a" / "run")


def losses(run_dir: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]
