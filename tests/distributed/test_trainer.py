"""The embedded trainer on gloo ranks: every layout trains the same model, run after run.

Several layouts share one launch, because starting ranks takes longer than training them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.launch import ROOT, run_ranks

TINY = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "global_batch_size": 8,
    "train_iters": 3,
    "lr_warmup_iters": 0,
    "eval_interval": 2,
    "eval_iters": 1,
    "max_corpus_bytes": 200_000,
    "bf16": False,
}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
SP = {"sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TIED = {"untie_embeddings_and_output_weights": False}

NOISY = {**TP2, **DROPOUT, "bf16": True}

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "tied": TIED},
    2: {
        "tp2": TP2,
        "tp2 sequence parallel": {**TP2, **SP},
        "pp2": PP2,
        "dp2": {},
        "dp2 sharded, overlapping": OVERLAP,
        "tp2 tied": {**TP2, **TIED},
        "pp2 tied": {**PP2, **TIED},
        "noisy": NOISY,
        "noisy again": NOISY,
        "noisy recompute": {**NOISY, **RECOMPUTE},
        "noisy other seed": {**NOISY, "seed": 7},
    },
    4: {
        "tp2 pp2": {**TP2, **PP2},
        "tp2 pp2 interleaved, sequence parallel": {**TP2, **VPP, **SP},
        "pp2 dp2 interleaved, sharded, overlapping": {**VPP, **OVERLAP},
        "tp2 dp2 sharded": {**TP2, **SHARDED},
    },
}

Results = dict[str, dict[str, Any]]


def train_layouts(ranks: int, layouts: dict[str, dict[str, Any]], folder: Path) -> list[Results]:
    values = {name: {**TINY, **layout} for name, layout in layouts.items()}
    arguments = {"layouts": values, "folder": str(folder)}
    function = "tests.distributed.workers.trainer:run_layouts"
    return run_ranks(ranks, function, arguments, timeout_s=200)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train_layouts(1, LAYOUTS[1], tmp_path_factory.mktemp("one"))[0]


def assert_same_training(result: dict[str, Any], expected: dict[str, Any]) -> None:
    # FP32: only the order of sums differs.
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-6)
    assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)
    for key in ("first_validation_loss", "validation_loss"):
        assert result[key] == pytest.approx(expected[key], rel=2e-6)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return train_layouts(2, LAYOUTS[2], tmp_path_factory.mktemp("two"))


def assert_same_model(per_rank: list[Results], reference: Results) -> None:
    for name, result in per_rank[0].items():
        if not name.startswith("noisy"):
            assert_same_training(result, reference["tied" if "tied" in name else "one"])
            assert result["losses"][0] > result["losses"][-1]
        # The loss is one number for all ranks, not each rank's own.
        assert all(other[name]["losses"] == result["losses"] for other in per_rank)


def test_every_layout_of_two_ranks_trains_the_same_model(
    two_ranks: list[Results], reference: Results
) -> None:
    assert_same_model(two_ranks, reference)


def test_every_layout_of_four_ranks_trains_the_same_model(
    reference: Results, tmp_path: Path
) -> None:
    assert_same_model(train_layouts(4, LAYOUTS[4], tmp_path), reference)


def test_recomputing_and_running_again_change_no_bit(two_ranks: list[Results]) -> None:
    for results in two_ranks:
        noisy = results["noisy"]
        assert results["noisy again"] == noisy
        assert results["noisy recompute"] == noisy
        assert results["noisy other seed"]["weights"] != noisy["weights"]


# ---- the command ------------------------------------------------------------------------------


def command(run_dir: Path, **values: Any) -> list[str]:
    """`megatron-snip train` with a tiny model on two tensor-parallel ranks."""
    settings = {**TINY, **TP2, "bf16": True, **values, "run_dir": str(run_dir)}
    file = run_dir.parent / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "megatron_snip", "train", "--config", str(file)]


def environment(folder: Path, **extra: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK")}
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**plain, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache"), **extra}


def test_one_command_trains_on_two_ranks_and_writes_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*command(run_dir), "--train-iters", "4", "--lr", "1e-2"]
    done = subprocess.run(
        words, env=environment(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing to worry a newcomer
    assert "validation loss" in done.stdout and str(run_dir / "metrics.jsonl") in done.stdout
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 1, 3]
    assert lines[-1]["validation_loss"] < lines[0]["validation_loss"]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "lowest_precision_fraction"} <= set(lines[0])
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


def test_a_crash_shows_the_failing_ranks_traceback_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASH_ON_RANK_1)
    done = subprocess.run(
        command(tmp_path / "run"),
        env=environment(tmp_path, PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "ArithmeticError: the reason why" in done.stderr
    assert done.stderr.splitlines()[-1] == "megatron-snip: training crashed; see above"


@pytest.mark.parametrize(("number", "size"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals, size: int) -> None:
    words = command(tmp_path / "run", tensor_model_parallel_size=size, train_iters=5000)
    front = subprocess.Popen(
        words,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        assert front.stdout is not None
        while "step" not in front.stdout.readline():  # the ranks train
            assert front.poll() is None and time.monotonic() < deadline
        ranks = children(front.pid)
        assert len(ranks) == size
        front.send_signal(number)
        _, said = front.communicate(timeout=60)
    finally:
        front.kill()
    assert front.returncode == 128 + number
    assert said == f"megatron-snip: ended by {number.name}\n"
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
