"""Tokens of an expert, by the data rank that sent them.

With expert parallelism tokens of several data ranks meet in an expert. Tiles along tokens and the
random numbers of stochastic rounding would then depend on the layout. An observer measures the
tokens of each data rank separately, in the order of the sequence, as the microbatch that they are
to the dense linears: then every layout measures what one rank alone would.

    alltoall     rows of an expert are ordered by (expert-tensor rank, expert rank) of their sender
    allgather    by rank in the group of both
    others       unknown order: all rows are measured together
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from megatron_snip.linears.layout import expert_layers
from megatron_snip.statistics.tap import TokenPart
from megatron_snip.topology import Placement, Topology


class ExpertDispatch:
    """The experts' layers of a model whose rows must be sorted by sender."""

    def __init__(self, chunks: Sequence[torch.nn.Module], topology: Topology) -> None:
        """Find them; communicates nothing."""
        layers = {name: _Layer(moe, topology) for name, moe in expert_layers(chunks)}
        self._layers = {name: layer for name, layer in layers.items() if layer.senders is not None}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """All ranks: within, the ranks exchange how many tokens they send to each expert."""
        with ExitStack() as stack:
            for layer in self._layers.values():
                stack.callback(layer.router.register_forward_hook(layer.count).remove)
            yield

    def parts(self, placement: Placement, num_rows: int) -> list[TokenPart] | None:
        """Return the rows of an expert's input by data rank; None if they are in order as they lie.

        Args:
            placement: any linear.
            num_rows: rows of its input.
        """
        layer = self._layers.get(placement.name.rpartition(".")[0])
        if layer is None or placement.expert is None:
            return None
        return layer.parts(placement.expert, num_rows)


@dataclass(frozen=True)
class Senders:
    """Who sends tokens to the experts of this rank.

    Attributes:
        ranks: (data rank, tensor rank) of each rank of the group that exchanges tokens.
        arrival: those ranks' indices, in the order in which their rows lie in an expert's input.
    """

    ranks: tuple[tuple[int, int], ...]
    arrival: tuple[int, ...]

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The data ranks among them, ascending."""
        return tuple(sorted({data for data, _ in self.ranks}))

    @property
    def in_order(self) -> bool:
        """Whether rows lie as one data rank alone would have them."""
        order = [self.ranks[i] for i in self.arrival]
        return len(self.data_ranks) == 1 and order == sorted(order)

    def rows(self, counts: Sequence[int]) -> list[list[range]]:
        """Return the rows of each data rank, in the order of its sequence.

        Args:
            counts: rows that each rank of the group has sent.
        """
        found: dict[tuple[int, int], range] = {}
        start = 0
        for i in self.arrival:
            found[self.ranks[i]] = range(start, start + counts[i])
            start += counts[i]
        places = sorted(found)
        return [[found[p] for p in places if p[0] == data] for data in self.data_ranks]


class _Layer:
    """One layer's router and experts.

    Attributes:
        router: Megatron's.
        senders: None where an expert's rows need no sorting, or their order is unknown.
        counts: rows that each sender gave each expert in the last forward, [ranks][experts].
    """

    def __init__(self, moe: Any, topology: Topology) -> None:
        self.router = moe.router
        self.counts: list[list[int]] = []
        self._group: dist.ProcessGroup = moe.token_dispatcher.tp_ep_group
        senders = _senders(moe.token_dispatcher, topology)
        self.senders = None if senders is None or senders.in_order else senders

    def count(self, module: Any, args: Any, output: Any) -> None:
        """All ranks of the group: exchange how many rows each sends to each expert."""
        if torch.is_grad_enabled():  # a forward that is recomputed later is not observed
            sent = output[1].sum(dim=0, dtype=torch.int64)
            self.counts = _gathered(sent, self._group)

    def parts(self, expert: int, num_rows: int) -> list[TokenPart] | None:
        """Return an expert's rows by data rank; None if their number is not the router's."""
        assert self.senders is not None
        counts = [sent[expert] for sent in self.counts]
        if sum(counts) != num_rows:  # tokens over an expert's capacity are dropped, rows padded
            return None
        ranks = zip(self.senders.data_ranks, self.senders.rows(counts), strict=True)
        return [TokenPart(rank, torch.cat([_indices(r) for r in rows])) for rank, rows in ranks]


def _indices(rows: range) -> torch.Tensor:
    return torch.arange(rows.start, rows.stop)


def _senders(dispatcher: Any, topology: Topology) -> Senders | None:
    """Return who is in the group that exchanges tokens, and in which order rows come.

    Known without communication (`Topology.places`).
    """
    group, tp, ep = dispatcher.tp_ep_group, dispatcher.tp_size, dispatcher.ep_size
    if tp * ep == 1:
        return None
    ranks = tuple(topology.places[rank] for rank in dist.get_process_group_ranks(group))
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        arrival = tuple(e * tp + t for t in range(tp) for e in range(ep))
    elif isinstance(dispatcher, MoEAllGatherTokenDispatcher):
        arrival = tuple(range(tp * ep))
    else:
        return None
    return Senders(ranks, arrival)


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """All ranks of the group: return every rank's integers, by rank."""
    own = values.to(torch.cuda.current_device())
    everyone = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everyone, own, group=group)
    found: list[list[int]] = everyone.view(group.size(), -1).tolist()
    return found
