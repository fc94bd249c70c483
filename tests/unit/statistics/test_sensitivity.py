"""D and |update|^2 of every planned weight, on one rank."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.statistics.optimizer_state import AdamShard, adam_shards
from megatron_snip.statistics.sensitivity import (
    PlannedWeight,
    _own_part,
    gather_sensitivity,
)
from megatron_snip.topology import Placement, Topology
from tests.unit.statistics.network import NAMES, Network


def gathered(network: Network) -> dict:  # type: ignore[type-arg]
    return gather_sensitivity(network.refresh_inputs().weights, network.optimizer, Topology())


def test_each_weight_has_its_own_moments() -> None:
    network = Network.make(steps=5)
    found = gathered(network)
    assert list(found) == list(NAMES)
    for sensitivity, w in zip(found.values(), network.weights, strict=True):
        shard = adam_shards(network.optimizer)[w]
        d, update = shard.sensitivity(), shard.update()
        assert d is not None and update is not None
        assert torch.equal(sensitivity.d, d.view_as(w))
        close = {"rtol": 1e-6, "atol": 0.0}
        norms = (update, d, w.detach())
        wanted = [t.double().square().sum() for t in norms]
        got = [
            torch.tensor(v, dtype=torch.float64)
            for v in (
                sensitivity.update_square,
                sensitivity.direction_square,
                sensitivity.weight_square,
            )
        ]
        for value, reference in zip(got, wanted, strict=True):
            torch.testing.assert_close(value, reference, **close)


def test_without_moments_the_gradient_stands_for_the_update() -> None:
    for network in (Network.make(steps=0), Network.make(steps=2, optimizer="sgd")):
        for sensitivity, w in zip(gathered(network).values(), network.weights, strict=True):
            assert sensitivity.update_square is None
            assert torch.equal(sensitivity.d, torch.ones_like(w))
            assert sensitivity.direction_square == pytest.approx(w.numel())


def test_moments_that_cover_a_part_do_not_count() -> None:
    """A rank that reads less than the whole weight's moments must not mix D with zeros."""
    network = Network.make(steps=3)
    w = network.weights[1]
    state = network.optimizer.state.pop(w)
    found = gathered(network)
    assert found[NAMES[0]].update_square is not None
    assert found[NAMES[1]].update_square is None
    network.optimizer.state[w] = state


def test_the_optimizer_and_the_weights_are_only_read() -> None:
    network = Network.make(steps=3)
    before = [t.clone() for s in network.optimizer.state.values() for t in s.values()]
    weights = [w.detach().clone() for w in network.weights]
    found = gathered(network)
    for sensitivity in found.values():
        sensitivity.d.fill_(7)
    after = [t for s in network.optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(network.weights, weights, strict=True))


def test_what_spare_memory_held_does_not_count() -> None:
    """A rank with a shard of the moments leaves zeros elsewhere: parts are added over ranks."""
    weight = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16))
    placement = Placement("l", 0, "column", 6, 4)
    spare = torch.full((4, 6), 7.0)
    shard = AdamShard(6, 18, torch.ones(12), torch.rand(12), 3, (0.9, 0.95), 1e-8)
    found, _ = _own_part(PlannedWeight(placement, weight, spare), shard, True)
    own, _ = _own_part(PlannedWeight(placement, weight), shard, True)
    assert found is spare and own.dtype == torch.bfloat16
    assert torch.equal(found, own.float())
    assert found.count_nonzero() == 12
