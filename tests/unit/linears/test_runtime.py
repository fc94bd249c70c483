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
    def keys(placement: Placement, rank: int) -> list[Any]:
        runtime = Runtime(Topology(data=Axis(rank, 3), expert_data=Axis(1, 2)), seed=9)
        with runtime.training_pass(4):
            return [runtime.next_stream(placement).key for _ in range(4)]

    found = [key for rank in range(3) for key in keys(PLACEMENT, rank)]
    assert {(key.iteration, key.seed) for key in found} == {(4, 9)}
    assert [key.microbatch for key in found] == [3 * m + r for r in range(3) for m in range(4)]
    assert len({key.word for key in found}) == 12
    expert = Placement("decoder.layers.0.mlp.experts.linear_fc2", 0, "row", 64, 48, expert=5)
    assert [key.microbatch for key in keys(expert, 2)] == [1, 3, 5, 7]
