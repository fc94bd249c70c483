"""Who meets whom in an expert, and routes that stay while weights change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_snip.linears.expert_routes import Choices, ExpertRoutes, Senders
from megatron_snip.linears.layout import expert_layers
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.passes import MeasuringPasses
from megatron_snip.topology import DataAxis, Placement, TensorAxis, Topology
from tests.unit.linears.conftest import MakeModel
from tests.unit.linears.test_passes import training

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_token_dispatcher_type": "alltoall",
}


# ---- senders ----------------------------------------------------------------------------------


def test_rows_are_sorted_by_data_rank_and_then_as_the_sequence_is() -> None:
    """Two expert ranks of two tensor ranks each: rows come by (tensor rank, expert rank)."""
    senders = Senders(ranks=((0, 0), (0, 1), (1, 0), (1, 1)), arrival=(0, 2, 1, 3), num_data=2)
    rows = senders.rows([3, 1, 2, 4])  # by rank; in order of arrival 3, 2, 1, 4
    assert rows == [[range(3), range(5, 6)], [range(3, 5), range(6, 10)]]
    assert senders.data_ranks == (0, 1) and not senders.in_order


def test_senders_of_one_data_rank_may_be_out_of_order() -> None:
    one = Senders(ranks=((3, 0), (3, 1)), arrival=(0, 1), num_data=4)
    assert one.in_order
    four = tuple((0, t) for t in range(4))
    assert not Senders(ranks=four, arrival=(0, 2, 1, 3), num_data=1).in_order
    assert Senders(four, (0, 2, 1, 3), 1).rows([1, 1, 1, 1]) == [
        [range(1), range(2, 3), range(1, 2), range(3, 4)]
    ]


@pytest.mark.parametrize("data_ranks", [(0, 1), (2, 3), (1, 3), (0, 2)])
def test_microbatches_count_as_those_of_the_dense_linears(data_ranks: tuple[int, int]) -> None:
    """Of four data ranks two meet; rank d's m-th microbatch is the step's m * 4 + d."""
    senders = Senders(tuple((d, 0) for d in data_ranks), (0, 1), num_data=4)
    topology = Topology(data=DataAxis(data_ranks[0], 4), expert_data=DataAxis(0, 2))
    expected = [m * 4 + d for m in range(3) for d in data_ranks]
    counted = []
    for i in range(6):
        place = Placement("x", 0, "row", 8, 8, expert=0, shown=senders.axis(i % 2))
        axis = topology.data_axis(place)
        counted.append(i * axis.size + axis.rank)
    assert counted == expected


# ---- choices ----------------------------------------------------------------------------------


class Router:
    router_replay: Any = None

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def best(s: torch.Tensor, k: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            values, chosen = torch.topk(s, k, dim=1)
            return values, chosen

        assert self.router_replay is not None
        found: tuple[torch.Tensor, torch.Tensor]
        found = self.router_replay.get_replay_topk(scores, 1, None, None, best)
        return found


def test_later_passes_take_the_first_ones_choices_with_their_own_scores() -> None:
    router, choices = Router(), Choices()
    first = [torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 3.0]])]
    with choices.kept_by(router):
        found = [int(router.choose(scores)[1]) for scores in first]
        with torch.no_grad():  # an evaluation's or a recomputed forward's count is its own
            assert int(router.choose(first[0])[1]) == 1
    assert found == [1, 0] and router.router_replay is None
    for _ in range(2):
        with choices.kept_by(router):
            values = [router.choose(-scores) for scores in first]
        assert [(float(v), int(i)) for v, i in values] == [(-2.0, 1), (-4.0, 0)]


def test_a_router_that_follows_somebody_elses_choices_goes_on_so() -> None:
    router, theirs = Router(), object()
    router.router_replay = theirs
    with Choices().kept_by(router):
        assert router.router_replay is theirs
    assert router.router_replay is theirs


# ---- a model ----------------------------------------------------------------------------------


class Counting:
    """An observer that counts an expert's tokens."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)

    def observe(self, placement: Any, input: Any, weight: Any, output: Any, sp: bool) -> Any:
        if placement.expert is not None:
            self.tokens[placement.instance].append(len(input))
        return output


@contextmanager
def perturbed(model: torch.nn.Module) -> Iterator[None]:
    """Other weights, by which routers would choose otherwise."""
    generator = torch.Generator().manual_seed(0)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty_like(p).normal_(0.0, 0.2, generator=generator))
    yield
    with torch.no_grad():
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)


def counted(passes: MeasuringPasses) -> dict[str, list[int]]:
    watcher = Counting()
    passes.run(watcher)
    return watcher.tokens


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_keep_their_experts_under_changed_weights(
    make_model: MakeModel, recompute: bool
) -> None:
    full = {"granularity": "full", "method": "uniform", "num_layers": 1} if recompute else {}
    model = make_model(**EXPERTS, **{f"recompute_{key}": value for key, value in full.items()})
    under = PlannedModel([model], Topology(), seed=0)
    under.install()

    def passes() -> MeasuringPasses:
        return MeasuringPasses(training(model), under.runtime, 2)

    refresh = passes()
    first = counted(refresh)
    assert len(first) == 2 * 4 * 2  # layers, experts, fc1 and fc2
    with perturbed(model):
        assert counted(passes()) != first  # it would matter
        assert counted(refresh) == first
    assert counted(refresh) == first
    routers = [moe.router for _, moe in expert_layers([model])]
    assert [router.router_replay for router in routers] == [None, None]
    under.uninstall()


def test_a_dense_models_observer_is_asked_directly(make_model: MakeModel) -> None:
    watcher = Counting()
    with ExpertRoutes([make_model()], Topology()).watched(watcher) as watched:
        assert watched is watcher


def test_experts_are_named_as_their_linears_are(make_model: MakeModel) -> None:
    names = [name for name, _ in expert_layers([make_model(**EXPERTS)])]
    assert names == [f"decoder.layers.{i}.mlp.experts" for i in range(2)]
    assert Topology().data_axis(Placement(names[0], 0, "row", 8, 8, TensorAxis())) == DataAxis()
