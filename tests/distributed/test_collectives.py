"""Sums over ranks, and refusals of one rank that are every rank's."""

from argparse import Namespace
from contextlib import nullcontext
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_snip.collectives import any_rank, sum_together
from megatron_snip.config import SnipConfig
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears import discovery
from megatron_snip.linears import model as planned
from megatron_snip.patches.attach import attach
from megatron_snip.patches.cpu.graphs import CUDAGraph, graph
from megatron_snip.patches.registry import Session
from megatron_snip.run.step import StepLoss
from megatron_snip.topology import Axis, Topology
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import PP2
from tests.distributed.small_model import NARROW, layout


def test_sums_are_right_and_the_same_bits_on_any_number_of_ranks() -> None:
    """FP64 against exact rational sums; sizes that are powers of two and such that are not."""
    results = run_ranks(6, "tests.distributed.test_collectives:sums")
    for size in range(1, 7):
        found = [result[size - 1] for result in results[:size]]
        given = zip(*(r["given"] for r in found), strict=True)
        exact = [sum(map(Fraction, column)) for column in given]
        for one in found:
            assert one["sum"] == found[0]["sum"]
            assert one["sum"] == pytest.approx([float(v) for v in exact], rel=1e-14)
            assert one["any"] == (size == 6)


def sums() -> list[dict[str, Any]]:
    """On ranks: sums over the first 1, 2, .. ranks; a flag is set on the last rank of all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(size)), backend="gloo") for size in range(1, world + 1)]
    found = []
    for group in groups[rank:]:
        given = torch.randn(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        total = torch.cat(sum_together([given[:2], given[2:]], group)).tolist()
        flag = any_rank(rank == world - 1, group)
        found.append({"given": given.tolist(), "sum": total, "any": flag})
    return [{}] * rank + found


def test_a_model_that_one_stage_cannot_run_is_refused_on_every_rank() -> None:
    """What a module or a linear of the last stage refuses; the first stage alone would go on."""
    first, last = run_ranks(2, "tests.distributed.test_collectives:refusals")
    assert first == last
    assert "the GEMMs of GroupedMLP are not in linear modules" in first["module"]
    assert first["linear"] == "this linear cannot run"
    assert first["names"] == "2 linears have one name"


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
            refusing = mock.patch.object(discovery, "find_linears", side_effect=refusal)
        with refusing, pytest.raises(UnsupportedError) as refused:
            attach(Session(), SnipConfig(), Namespace(), model, None, lambda: (None, None), [])
        found["names"] = str(refused.value)
        if dist.get_rank() == 1:
            model[-1].add_module("experts", GroupedMLP())
        with pytest.raises(UnsupportedError) as refused:
            attach(Session(), SnipConfig(), Namespace(), model, None, lambda: (None, None), [])
        found["module"] = str(refused.value)
    return found


def test_a_loss_that_one_rank_cannot_read_is_none_on_every_rank() -> None:
    assert run_ranks(2, "tests.distributed.test_collectives:losses") == [[3.0, None]] * 2


def losses() -> list[float | None]:
    """On ranks: a step's loss whose report each rank can read, and one that the last cannot."""
    group = dist.new_group(backend="gloo")
    axis = Axis(rank=dist.get_rank(), size=2, group=group)
    topology = Topology(rank=axis.rank, world_size=2, data=axis, control=group)
    results = [{"lm loss": torch.tensor([6.0, 2.0])}]
    readable = StepLoss(results, topology).read()
    if axis.rank == 1:
        results = [{"lm loss": torch.empty(0)}]
    return [readable, StepLoss(results, topology).read()]


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
