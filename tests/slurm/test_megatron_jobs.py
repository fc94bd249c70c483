"""launch/slurm.sbatch with a script of Megatron's own kind, which knows nothing of SNIP."""

import json
import os
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, TIMEOUT_S
from tests.slurm.cluster import Cluster, until

PYTHON = ROOT / ".venv-megatron" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs megatron.training: `make test-megatron` installs it"
)

STOPPABLE = """
import os, runpy, signal, time
from megatron.training import get_args, training
original = training.train_step
def train_step(*args, **kwargs):
    at, first = int(os.environ["STOP_AT"]), os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    if first and get_args().curr_iteration == at:
        print("waiting for the signal", flush=True)
        signal.pause()
    return original(*args, **kwargs)
training.train_step = train_step
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
"""
"""The tiny script, which waits in its first attempt for the signal before iteration STOP_AT."""


def submit(cluster: Cluster, folder: Path, stop_at: int) -> int:
    """Submit the tiny training on two nodes, tensor-parallel; return the job's number."""
    from tests.megatron.lab import MODEL, SCRIPT, SNIP

    folder.mkdir()
    (folder / "pretrain.py").write_text(STOPPABLE)
    environment = {
        "SNIP_PYTHON": str(PYTHON),
        "SNIP_RANKS_PER_NODE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "SCRIPT": SCRIPT,
        "STOP_AT": str(stop_at),
        "TINY_RESULTS": str(folder),
        "SNIP_CHECKPOINTS": str(folder / "checkpoints"),
    }
    words = [f"--job-name={folder.name}", str(ROOT / "launch" / "slurm.sbatch"), "--cpu"]
    words += ["pretrain.py", *MODEL.split(), "--tensor-model-parallel-size", "2", *SNIP]
    words += ["--train-iters", "16", "--snip-start-step", "11"]  # a plan for the last iterations
    words += ["--save-interval", "100"]  # Megatron insists
    return cluster.submit(words, environment, folder)


def weights(folder: Path) -> list[str]:
    return [json.loads((folder / f"{rank}.json").read_text())["weights"] for rank in range(2)]


def test_a_megatron_script_comes_back_from_its_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    whole, limited = tmp_path / "whole", tmp_path / "limited"
    job = cluster.wait(submit(cluster, whole, stop_at=-1), TIMEOUT_S)
    log = Path(job["StdOut"]).read_text(errors="replace")
    assert job["JobState"] == "COMPLETED", log

    number = submit(cluster, limited, stop_at=6)
    output = Path(cluster.job(number)["StdOut"])
    # Both ranks wait; signal.pause() would miss a signal that came before it.
    until(lambda: output.exists() and output.read_text().count("waiting for the signal") == 2, "it")
    cluster.warn_of_time_limit(number, output)
    job = cluster.wait(number, TIMEOUT_S)
    log = output.read_text(errors="replace")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log[-6000:]
    assert "attempt 2, from iteration 7" in log
    assert weights(limited) == weights(whole)
    plans = [sorted(os.listdir(f / "checkpoints" / "snip" / "plans")) for f in (whole, limited)]
    assert plans[0] == plans[1] and plans[0]
