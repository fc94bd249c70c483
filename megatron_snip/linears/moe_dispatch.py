"""Tokens of an expert, by the data rank that sent them.

With expert parallelism, tokens of several data ranks meet in an expert. Tiles along tokens and the
random numbers of stochastic rounding would then depend on the layout. An observer measures the
tokens of each data rank separately, in the order of the sequence, as the microbatch that they are
to the dense linears: then every layout measures what one rank alone would.

    alltoall     rows of an expert are ordered by (expert-tensor rank, expert rank) of their sender
    allgather    by rank in the group of both
    others       unknown order: all rows are measured together
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from megatron_snip.linears.discovery import expert_layers
from megatron_snip.statistics.observer import RowsBySender
from megatron_snip.topology import Placement, Topology


class ExpertDispatch:
    """The MoE layers of a model whose experts' rows must be sorted by sender."""

    def __init__(self, chunks: Sequence[torch.nn.Module], topology: Topology) -> None:
        """All ranks: find them. Ranks that exchange tokens exchange their places, once."""
        places_of: dict[dist.ProcessGroup, list[tuple[int, int]]] = {}
        layers = {name: _layer(moe, topology, places_of) for name, moe in expert_layers(chunks)}
        self._layers = {name: layer for name, layer in layers.items() if layer is not None}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """All ranks: within, ranks count how many tokens they send to each expert."""
        with ExitStack() as stack:
            for layer in self._layers.values():
                stack.callback(layer.router.register_forward_hook(layer.count).remove)
            yield

    def rows_by_sender(self, placement: Placement, num_rows: int) -> RowsBySender | None:
        """Return the rows of an expert's input by data rank; None if they need no sorting.

        The ranks that exchange tokens call it together for each layer; it waits for the device.

        Args:
            placement: any linear.
            num_rows: rows of its input.
        """
        layer = self._layers.get(placement.name.rpartition(".")[0])
        if layer is None or placement.expert is None:
            return None
        return layer.rows_by_sender(placement.expert, num_rows)


@dataclass
class _Layer:
    """One MoE layer.

    Attributes:
        router: Megatron's.
        group: the ranks that exchange tokens.
        arrival: the ranks of the group, in the order of their rows in an expert's input.
        places: (data rank, tensor rank) of each, in that order.
        sent: rows that this rank sent to each expert in the last forward; None once they are in
            `counts`.
        counts: rows that each rank sent to each expert, [ranks][experts].
    """

    router: torch.nn.Module
    group: dist.ProcessGroup
    arrival: list[int]
    places: list[tuple[int, int]]
    sent: torch.Tensor | None = None
    counts: list[list[int]] = field(default_factory=list)

    def count(self, module: Any, args: Any, output: Any) -> None:
        """Count how many rows this rank sends to each expert."""
        if torch.is_grad_enabled():  # a forward that is recomputed later is not observed
            self.sent = output[1].sum(dim=0, dtype=torch.int64).to(torch.cuda.current_device())

    def rows_by_sender(self, expert: int, num_rows: int) -> RowsBySender | None:
        """Return an expert's rows by data rank; None if their number is not the router's."""
        if self.sent is not None:  # the first of the layer's linears to ask in this forward
            everyone = self.sent.new_empty(self.group.size() * self.sent.numel())
            dist.all_gather_into_tensor(everyone, self.sent, group=self.group)
            self.counts = everyone.view(self.group.size(), -1)[self.arrival].tolist()
            self.sent = None
        counts = [sent[expert] for sent in self.counts]
        if sum(counts) != num_rows:  # tokens over an expert's capacity are dropped, rows padded
            return None
        by_place = dict(zip(self.places, torch.split(torch.arange(num_rows), counts), strict=True))
        by_rank: dict[int, list[torch.Tensor]] = {}
        for place in sorted(by_place):  # in the order of the sender's sequence
            by_rank.setdefault(place[0], []).append(by_place[place])
        return {rank: torch.cat(parts) for rank, parts in by_rank.items()}


def _layer(
    moe: Any, topology: Topology, places_of: dict[dist.ProcessGroup, list[tuple[int, int]]]
) -> _Layer | None:
    """All ranks: return a layer; None where rows need no sorting, or their order is unknown.

    Args:
        moe: Megatron's MoE layer.
        topology: this rank's place.
        places_of: (data rank, tensor rank) of the ranks of a group, for groups asked before.
    """
    dispatcher = moe.token_dispatcher
    group = dispatcher.tp_ep_group
    tp = dispatcher.tp_size
    ep = dispatcher.ep_size
    if tp * ep == 1:
        return None
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        arrival = [e * tp + t for t in range(tp) for e in range(ep)]
    elif isinstance(dispatcher, MoEAllGatherTokenDispatcher):
        arrival = list(range(tp * ep))
    else:
        return None
    if group not in places_of:
        device = torch.cuda.current_device()
        own = torch.tensor([topology.data.rank, topology.tp.rank], device=device)
        everyone = own.new_empty(2 * group.size())
        dist.all_gather_into_tensor(everyone, own, group=group)
        places_of[group] = [(data, tensor) for data, tensor in everyone.view(-1, 2).tolist()]
    places = [places_of[group][i] for i in arrival]
    if len({data for data, _ in places}) == 1 and places == sorted(places):
        return None  # the rows are as one data rank alone would have them
    return _Layer(moe.router, group, arrival, places)
