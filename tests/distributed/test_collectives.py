"""Sums over ranks, and refusals of one rank that are every rank's."""

import math
import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_snip.collectives import Control, RemoteFailure, sum_together
from megatron_snip.config import SnipConfig
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.linears import model as planned
from megatron_snip.patches.agreement import refuse_ranks_without_snip
from megatron_snip.patches.attach import attach
from megatron_snip.patches.cpu.graphs import CUDAGraph, graph
from megatron_snip.patches.registry import Session
from megatron_snip.run.step import StepLoss
from megatron_snip.topology import Axis, Topology
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import PP2
from tests.distributed.small_model import NARROW, layout


def test_every_exchange_is_right_on_any_number_of_ranks() -> None:
    """FP64 against exact rational sums; sizes that are powers of two and such that are not."""
    results = run_ranks(6, "tests.distributed.test_collectives:exchanges")
    for size in range(1, 7):
        found = [result[size - 1] for result in results[:size]]
        given = zip(*(r["given"] for r in found), strict=True)
        exact = pytest.approx([float(sum(map(Fraction, column))) for column in given], rel=1e-14)
        for one in found:
            assert one["axis"] == exact
            assert one["sum"] == found[0]["sum"] == exact  # the same bits
            assert one["largest"] == [size - 1.0, 0.0]
            assert one["any"] == (size == 6)
            assert one["sources"] == list(range(size))
            assert one["rank 0"] == one["broadcast"] == 0
            assert one["by rank"] == [i // 2 for i in range(size)]
            assert one["distinct"] == list(range((size + 1) // 2))
            assert one["long"] == [[i % 2, 5000] for i in range(size)]
            assert one["failed"] == f"trying failed on rank {size - 1}: KeyError: 'x'"


def exchanges() -> list[dict[str, Any]]:
    """On ranks: exchanges of the first 1, 2, .. ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(size)), backend="gloo") for size in range(1, world + 1)]
    found: list[dict[str, Any]] = [{}] * rank
    for group in groups[rank:]:
        control = Control(group)
        size = control.size
        given = torch.randn(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        total = given.clone()
        largest = torch.tensor([rank, -rank], dtype=torch.float32)
        control.sum_(total, largest)
        last = size - 1
        gathered = control.gather("trying", lambda: rank // 2)
        long = control.gather("trying", lambda: [rank % 2, "x" * 5000]).by_rank()

        def fails(last: int = last) -> None:
            if rank == last:
                raise KeyError("x")

        with pytest.raises(RemoteFailure) as failed:
            control.attempt("trying", fails)
        found.append(
            {
                "given": given.tolist(),
                "axis": torch.cat(sum_together([given[:2], given[2:]], group)).tolist(),
                "sum": total.tolist(),
                "largest": largest.tolist(),
                "any": control.any(rank == world - 1),
                "sources": [
                    int(control.broadcast_(torch.tensor([rank]), source)) for source in range(size)
                ],
                "broadcast": control.broadcast(rank),
                "rank 0": control.on_rank_0("trying", lambda: rank),
                "by rank": list(gathered.by_rank()),
                "distinct": list(gathered.values),
                "long": [[bit, len(text)] for bit, text in long],
                "failed": str(failed.value),
            }
        )
    return found


@pytest.mark.parametrize("size", [8, 32])
def test_no_exchange_takes_more_messages_than_a_tree(size: int) -> None:
    """A ring takes 2 (ranks - 1) of them, which no large job can wait for."""
    most = 6 * math.log2(size)
    found = run_ranks(size, "tests.distributed.test_collectives:messages")
    for rank in found:
        assert set(rank) == {"sum", "any", "attempt", "gather", "long", "broadcast", "last", "none"}
        for name, (exchanges, messages) in rank.items():
            assert messages <= most, name
            assert exchanges == (name != "none"), name
        assert rank["attempt"][1] <= most / 3  # a vote is a message each way
    assert max(rank["gather"][1] for rank in found) >= math.log2(size)  # they were counted


def messages() -> dict[str, list[int]]:
    """On ranks: (exchanges, messages) of each kind of exchange on this rank."""
    control = Control.of_all_ranks()
    rank = control.rank
    kinds: dict[str, Callable[[], Any]] = {
        "sum": lambda: control.sum_(torch.zeros(100_000), torch.zeros(10)),
        "any": lambda: control.any(False),
        "attempt": lambda: control.attempt("trying", lambda: None),
        "gather": lambda: control.gather("trying", lambda: rank // 4),
        "long": lambda: control.gather("trying", lambda: "x" * 10_000 * (1 + rank % 2)),
        "broadcast": lambda: control.broadcast("x" * 10_000),
        "last": lambda: control.broadcast_(torch.zeros(3), control.size - 1),
        "none": lambda: None,
    }
    found = {}
    for name, run in kinds.items():
        before = replace(control.traffic)
        run()
        now = control.traffic
        found[name] = [now.exchanges - before.exchanges, now.messages - before.messages]
    return found


def test_ranks_without_snip_are_named_on_all_others() -> None:
    """They are in the barrier that Megatron has there. A process may train twice."""
    ranks = run_ranks(5, "tests.distributed.test_collectives:some_without_snip")
    line = "--snip is missing on ranks 0, 2-3; start all ranks with the same flags and files"
    assert ranks == [[None, None], [None, line]] + [[None, None]] * 2 + [[None, line]]


def some_without_snip() -> list[str | None]:
    """On ranks: what each found at the first start, and at one where three ranks have no SNIP."""
    found: list[str | None] = []
    for without in ([], [0, 2, 3]):
        if dist.get_rank() in without:
            dist.barrier()
            found.append(None)
            continue
        try:
            refuse_ranks_without_snip()
            found.append(None)
        except UsageError as error:
            found.append(error.message)
    dist.barrier()  # rank 0 has the store
    return found


def test_a_model_that_one_stage_cannot_run_is_refused_on_every_rank() -> None:
    """What a module or a linear of the last stage refuses; the first stage alone would go on."""
    first, last = run_ranks(2, "tests.distributed.test_collectives:refusals")
    assert first == last
    assert "the GEMMs of GroupedMLP are not in linear modules" in first["module"]
    assert first["linear"] == "this linear cannot run"
    assert first["names"] == "2 linears have one name"
    assert first["settings"] == (
        "the ranks have other settings: --snip-interval is 200 on rank 0, 7 on rank 1; "
        "NVTE_NVFP4_DISABLE_RHT is without effect on rank 0, 1 on rank 1; "
        "--seed is not there on rank 0, 5 on rank 1; start all ranks with the same flags, files "
        "and environment, on equal machines"
    )


def refusals() -> dict[str, str]:
    """On ranks: what attaching says on this one."""
    found = {}
    with layout({**NARROW, **PP2}) as trainer:
        model = list(trainer.state.model)
        refusing: Any = nullcontext()
        if dist.get_rank() == 1:
            refusal = UnsupportedError("this linear cannot run")
            refusing = mock.patch.object(planned, "SimulatedMegatronLinear", side_effect=refusal)
        with refusing, pytest.raises(UnsupportedError) as refused:
            trainer.controller({})
        found["linear"] = str(refused.value)
        if dist.get_rank() == 1:
            refusal = UnsupportedError("2 linears have one name")
            refusing = mock.patch.object(planned, "find_linears", side_effect=refusal)
        args = Namespace(micro_batch_size=1, seq_length=64, seed=1, eval_iters=0)
        with refusing, pytest.raises(UnsupportedError) as refused:
            attach(Session(), SnipConfig(), args, model, None, dict, [])
        found["names"] = str(refused.value)
        settings = SnipConfig(interval=7) if dist.get_rank() == 1 else SnipConfig()
        args = Namespace(seed=5) if dist.get_rank() == 1 else Namespace()
        environment = {"NVTE_NVFP4_DISABLE_RHT": str(dist.get_rank())}
        with mock.patch.dict(os.environ, environment), pytest.raises(UsageError) as other:
            attach(Session(), settings, args, model, None, dict, [])
        found["settings"] = str(other.value)
        if dist.get_rank() == 1:
            model[-1].add_module("experts", GroupedMLP())
        with pytest.raises(UnsupportedError) as refused:
            attach(Session(), SnipConfig(), Namespace(), model, None, dict, [])
        found["module"] = str(refused.value)
    return found


def test_a_loss_that_one_rank_cannot_read_is_none_on_every_rank() -> None:
    assert (
        run_ranks(2, "tests.distributed.test_collectives:losses") == [[3.0, None, 3.0, "nan"]] * 2
    )


def losses() -> list[float | str | None]:
    """On ranks: losses that each rank can read, that the last one cannot, and that are judged."""
    group = dist.new_group(backend="gloo")
    axis = Axis(rank=dist.get_rank(), size=2, group=group)
    topology = Topology(rank=axis.rank, world_size=2, data=axis, control=Control(group))
    results = [{"lm loss": torch.tensor([6.0, 2.0])}]
    readable = StepLoss(results, topology).read()
    if axis.rank == 1:
        results = [{"lm loss": torch.empty(0)}]
    unreadable = StepLoss(results, topology).read()
    before = topology.control.traffic.exchanges
    results = [{"lm loss": torch.tensor([6.0, 2.0])}]
    judged = [StepLoss(results, topology).read_judged(finite) for finite in (True, axis.rank != 0)]
    assert topology.control.traffic.exchanges == before + 2  # a watched iteration has one
    return [readable, unreadable, judged[0], str(judged[1])]


class GroupedMLP(torch.nn.Module):
    """Has the name of Megatron's experts that multiply without linears."""


def test_in_a_graph_on_the_cpu_both_ranks_may_send_first() -> None:
    """As neighbouring pipeline stages do; the replays exchange what is there by then."""
    first, second = run_ranks(2, "tests.distributed.test_collectives:exchanged")
    assert (first, second) == ([22.0, 42.0], [20.0, 40.0])


def exchanged() -> list[float]:
    """On two ranks: twice what the other one had in each of two replays."""
    rank = dist.get_rank()
    sent = torch.zeros(1)
    received = torch.zeros(1)
    recorded = CUDAGraph()
    with graph(recorded):
        operations = [
            dist.P2POp(dist.isend, sent, 1 - rank),
            dist.P2POp(dist.irecv, received, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        doubled = received * 2
    found = []
    for number in (10, 20):
        sent.fill_(number + rank)
        recorded.replay()
        found.append(doubled.item())
    return found
