"""launch/torchrun.sh: the command that it prints and runs."""

import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from tests.unit.launch.shell import commands, run_script, stand_in

TWO_NODES = {
    "SNIP_NODES": "2",
    "SNIP_NODE_RANK": "1",
    "SNIP_RANKS_PER_NODE": "4",
    "MASTER_ADDR": "host a",
    "MASTER_PORT": "1234",
}


def dry_run(folder: Path, *words: str, **environment: str) -> list[str]:
    done = run_script("torchrun.sh", "--dry-run", *words, folder=folder, environment=environment)
    (command,) = commands(done)
    return command


def test_one_node_needs_no_address(tmp_path: Path) -> None:
    words = ["train", "--config", "a file.yaml", "--snip-pin", "decoder.*=fp8"]
    command = dry_run(tmp_path, *words, SNIP_RANKS_PER_NODE="2", SNIP_PYTHON="/a python")
    assert command[:3] == ["/a python", "-m", "torch.distributed.run"]
    read = parse_args(command[3:])
    assert (read.nproc_per_node, read.standalone, read.nnodes) == ("2", True, "1:1")
    assert (read.module, read.training_script) == (True, "megatron_snip")
    assert read.training_script_args == words


def test_several_nodes_meet_at_the_first_in_their_order(tmp_path: Path) -> None:
    read = parse_args(dry_run(tmp_path, "pretrain_gpt.py", "--snip", **TWO_NODES)[3:])
    assert (read.rdzv_backend, read.standalone) == ("static", False)
    assert (read.nnodes, read.node_rank, read.nproc_per_node) == ("2", 1, "4")
    assert (read.master_addr, read.master_port) == ("host a", 1234)
    assert read.training_script_args == ["pretrain_gpt.py", "--snip"]


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_several_nodes_without_an_address_are_refused(tmp_path: Path, missing: str) -> None:
    environment = {name: value for name, value in TWO_NODES.items() if name != missing}
    done = run_script("torchrun.sh", "train", folder=tmp_path, environment=environment)
    assert done.returncode != 0
    assert missing in done.stderr


def test_both_programs_save_and_go_on_in_one_folder(tmp_path: Path) -> None:
    folder = {"SNIP_CHECKPOINTS": "/c"}
    both = ["--save", "/c", "--load", "/c"]
    assert dry_run(tmp_path, "train", **folder)[-5:] == ["train", *both]
    script = dry_run(tmp_path, "--cpu", "dir/pretrain_gpt.py", "--snip", **folder)
    signals = ["--exit-signal-handler", "--exit-signal", "SIGUSR1"]
    begin = script.index("--cpu")
    assert script[begin:] == ["--cpu", "dir/pretrain_gpt.py", "--snip", *both, *signals]


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--cpu"], ["plan"], ["--snip"]])
def test_other_words_show_the_usage(tmp_path: Path, words: list[str]) -> None:
    done = run_script("torchrun.sh", *words, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: torchrun.sh")


RANK = """
import os, signal, subprocess, sys, time

def save(*_):
    time.sleep(0.2)  # a signal to the child as well would have ended it by now
    print("rank: saved, its child is", "gone" if child.poll() is not None else "alive")
    child.kill()
    os._exit(0)

os.kill(os.getpid(), signal.SIGUSR1)  # still starting: without a handler it must not die
signal.signal(signal.SIGUSR1, save)
child = subprocess.Popen(["sleep", "60"])  # its handler would be the default
exec(os.environ["ASK"])
time.sleep(20)
sys.exit("nobody has sent the signal")
"""


@pytest.mark.parametrize(
    ("ask", "checkpoints"),
    [("os.kill(int(os.environ['STARTER']), signal.SIGUSR1)", ""), ("open('c/.stop', 'w')", "c")],
    ids=["signal", "file"],
)
def test_a_wish_to_stop_reaches_the_ranks_alone(tmp_path: Path, ask: str, checkpoints: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    # torchrun's parent is the script.
    torchrun = f"export STARTER=$PPID; {sys.executable} -u rank.py; echo torchrun: status $?"
    stand_in(tmp_path, "python3", torchrun)
    environment = {"SNIP_CHECKPOINTS": checkpoints, "ASK": ask}
    done = run_script("torchrun.sh", "train", folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank: saved, its child is alive\ntorchrun: status 0\n"


def test_other_signals_end_torchrun(tmp_path: Path) -> None:
    stand_in(tmp_path, "python3", 'kill -TERM "$PPID"; while :; do sleep 0.05; done')
    done = run_script("torchrun.sh", "train", folder=tmp_path)
    assert done.returncode == 128 + 15
