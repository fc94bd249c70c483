"""One rank is killed, stopped or late in an exchange: all others end alike, or all go on."""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_snip.collectives import Control
from megatron_snip.rank_tree import LostRankError
from tests.distributed.launch import shared_server

SIZE = 8
TIMEOUT_S = 15.0
"""Of the job, as `--distributed-timeout-minutes`; an exchange takes milliseconds."""
LIMIT_S = 20 * TIMEOUT_S
"""After it a test fails: a rank did not end."""

EXCHANGES: dict[str, Callable[[Control], Any]] = {
    "sum": lambda control: control.sum_(torch.ones(50_000)).sum().item(),
    "vote": lambda control: control.any(control.rank == 3),
    "attempt": lambda control: control.attempt("trying", lambda: 1),
    "gather": lambda control: [*control.gather("trying", lambda: "x" * 2000).values],
    "broadcast": lambda control: control.broadcast("x"),
    "from the last rank": lambda control: control.broadcast_(torch.ones(3), SIZE - 1).tolist(),
}


def cases(kinds: list[str], slow: list[str]) -> list[Any]:
    return [*kinds, *(pytest.param(kind, marks=pytest.mark.slow) for kind in slow)]


@pytest.mark.parametrize("kind", EXCHANGES)
def test_when_a_rank_is_killed_every_other_rank_ends_and_names_it(kind: str) -> None:
    for rank, ended in enumerate(run(kind, "killed", victim=5)):
        assert rank == 5 or ended["lost"].startswith("rank 5 has ended, or did not answer"), ended


@pytest.mark.parametrize("victim", [0, 4, 7])
def test_whichever_rank_is_killed(victim: int) -> None:
    """The first one, one with others below it, the last one."""
    for rank, ended in enumerate(run("gather", "killed", victim)):
        assert rank == victim or ended["lost"].startswith(f"rank {victim} "), ended


@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        ("killed", 4),
        pytest.param("killed", 0, marks=pytest.mark.slow),
        pytest.param("killed", 7, marks=pytest.mark.slow),
        pytest.param("stopped", 4, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_before_anything_was_exchanged_is_named_as_well(
    fault: str, victim: int
) -> None:
    """No rank is connected to it then, and all others end at the timeout."""
    for rank, ended in enumerate(run("gather", fault, victim, exchanged_before=False)):
        assert rank == victim or ended["lost"].startswith(f"rank {victim} "), ended


@pytest.mark.parametrize("kind", cases(["vote"], ["sum", "gather", "from the last rank"]))
def test_when_a_rank_is_stopped_every_other_rank_ends_within_the_jobs_timeout(kind: str) -> None:
    for rank, ended in enumerate(run(kind, "stopped", victim=6)):
        assert rank == 6 or ended["lost"].startswith("rank 6 has ended, or did not answer"), ended


@pytest.mark.parametrize("kind", cases(["gather"], ["sum", "vote", "attempt", "broadcast"]))
def test_when_a_rank_is_late_all_go_on(kind: str) -> None:
    results = [ended["result"] for ended in run(kind, "late", victim=4)]
    assert results == [results[0]] * SIZE


def run(kind: str, fault: str, victim: int, exchanged_before: bool = True) -> list[dict[str, Any]]:
    """What each rank found; the store is here, as torchrun's agent has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = {"kind": kind, "fault": fault, "victim": victim, "port": store.port}
    arguments["exchanged_before"] = exchanged_before
    function = "tests.distributed.test_lost_ranks:take_part"
    return shared_server().run(SIZE, function, arguments).finished()


def take_part(**arguments: Any) -> dict[str, Any]:
    """On ranks: be a rank in a process of its own, whose end this one outlives."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = _be_rank(int(os.environ["RANK"]), **arguments)
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    is_gone = arguments["fault"] == "stopped" and os.environ["RANK"] == str(arguments["victim"])
    readable, _, _ = select.select([reading], [], [], 3 * TIMEOUT_S if is_gone else LIMIT_S)
    text = os.read(reading, 1 << 16) if readable else b""
    os.kill(child, signal.SIGKILL)  # a stopped one too
    os.waitpid(child, 0)
    return json.loads(text) if text else {"lost": "this process ended without a result"}


def _be_rank(
    rank: int, kind: str, fault: str, victim: int, port: int, exchanged_before: bool
) -> dict[str, Any]:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    control = Control.of_all_ranks()
    if exchanged_before:
        control.any(False)
        control.broadcast_(torch.zeros(1), SIZE - 1)
    if rank == victim:
        if fault == "late":
            time.sleep(TIMEOUT_S / 5)
        else:
            time.sleep(0.5)  # others wait by then
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    try:
        result = EXCHANGES[kind](control)
        if fault != "late":
            control.any(False)  # who sends nothing to the lost rank learns of it here
        return {"result": result}
    except LostRankError as lost:
        return {"lost": str(lost)}
