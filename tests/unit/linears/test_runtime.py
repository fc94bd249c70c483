"""Observers and streams shared by all linears."""

from typing import Any

import pytest

from megatron_snip.linears.runtime import Runtime
from megatron_snip.topology import Axis, Placement, Topology

PLACEMENT = Placement("decoder.layers.0.mlp.linear_fc2", 0, "row", 64, 48)
OBSERVER: Any = object()


def test_an_observer_watches_within_its_block_whatever_happens() -> None:
    runtime = Runtime(Topology(), seed=0)

    def fail() -> None:
        with runtime.observed_by(OBSERVER):
            assert runtime.observer is OBSERVER
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert runtime.observer is None


def test_streams_count_microbatches_over_data_ranks() -> None:
    def key(rank: int, microbatch: int, step: int = 4) -> Any:
        runtime = Runtime(Topology(data=Axis(rank, 3), expert_data=Axis(rank, 2)), seed=9)
        runtime.begin_pass(step)
        return runtime.stream(PLACEMENT, microbatch).key

    assert (key(1, 2).microbatch, key(1, 2).iteration, key(1, 2).seed) == (7, 4, 9)
    assert len({key(r, m).word for r in range(3) for m in range(4)}) == 12


def test_experts_count_over_their_own_data_ranks() -> None:
    topology = Topology(data=Axis(2, 4), expert_data=Axis(1, 2))
    expert = Placement("decoder.layers.0.mlp.experts.linear_fc2", 0, "row", 64, 48, expert=5)
    assert Runtime(topology, seed=0).stream(expert, 3).key.microbatch == 7
