"""Experts under measuring passes: the same routes in every pass, and each data rank's tokens apart.

A router sends a token to the experts of its highest scores. The probe moves the weights and with
them the scores, and a token that goes to another expert is another input there, not a changed one:
nothing could be compared. So the first pass's choices are kept, and later passes take them, with
the weights that their own scores give the chosen experts.

With expert parallelism tokens of several data ranks meet in an expert. Tiles along tokens and the
random numbers of stochastic rounding would then depend on who meets whom. An observer is shown
each data rank's tokens by themselves, in the order of the sequence, as the microbatch that they
are to the dense linears: then every layout shows it what one rank alone does.

    alltoall     rows of an expert come by (expert-tensor rank, expert rank) of their sender
    allgather    by rank in the group of both
    others       unknown: an observer is shown all rows at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from megatron_snip.linears.layout import expert_layers
from megatron_snip.statistics.tap import Observer
from megatron_snip.topology import DataAxis, Placement, Topology


class ExpertRoutes:
    """The experts' layers of a model, for the passes of one refresh."""

    def __init__(self, chunks: Sequence[torch.nn.Module], topology: Topology) -> None:
        """Find them, and who sends tokens to whom; nobody is asked."""
        self._layers = {name: _Layer(moe, topology) for name, moe in expert_layers(chunks)}

    @contextmanager
    def watched(self, observer: Observer) -> Iterator[Observer]:
        """All ranks: within, one pass runs over the microbatches; show it to what is yielded.

        The first pass keeps the routers' choices; the next take them.
        """
        if not self._layers:
            yield observer
            return
        with ExitStack() as stack:
            for layer in self._layers.values():
                stack.enter_context(layer.choices.kept_by(layer.router))
                if layer.senders is not None:
                    stack.callback(layer.router.register_forward_hook(layer.count).remove)
            yield _BySender(observer, self._layers)


@dataclass(frozen=True)
class Senders:
    """Who sends tokens to the experts of this rank.

    Attributes:
        ranks: (data rank, tensor rank) of each rank of the group that exchanges tokens.
        arrival: those ranks' indices, in the order in which their rows lie in an expert's input.
        num_data: data ranks of the whole job.
    """

    ranks: tuple[tuple[int, int], ...]
    arrival: tuple[int, ...]
    num_data: int

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

    def axis(self, index: int) -> DataAxis:
        """Return how the microbatches of the index-th data rank count.

        A linear is shown one microbatch after another, of every data rank d_0 < d_1 .. < d_(S-1)
        in turn: the i-th shown, i = m S + k, is microbatch m D + d_k of D data ranks' step.
        """
        size = self.num_data // len(self.data_ranks)
        return DataAxis(rank=self.data_ranks[index] - index * size, size=size)


class Choices:
    """A router's choices in the microbatches of a step; has the form of Megatron's RouterReplay.

    Recomputed forwards run with gradients and first ones without, each kind in the order of the
    microbatches.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._next = {False: 0, True: 0}
        self._complete = False

    @contextmanager
    def kept_by(self, router: Any) -> Iterator[None]:
        """Within, a pass runs; a router that already follows somebody else's choices does so."""
        if getattr(router, "router_replay", self) is not None:
            yield
            return
        self._next = {False: 0, True: 0}
        router.router_replay = self
        try:
            yield
        finally:
            router.router_replay = None
            self._complete = bool(self._kept)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores [tokens, topk], experts [tokens, topk]) of the choices."""
        kind = torch.is_grad_enabled()
        index, self._next[kind] = self._next[kind], self._next[kind] + 1
        if self._complete and index < len(self._kept):
            chosen = self._kept[index]
            return scores.gather(1, chosen), chosen
        assert default_compute_topk is not None, "Megatron passes its own choice"
        values, chosen = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if index == len(self._kept):
            self._kept.append(chosen)
        return values, chosen


class _Layer:
    """One layer's router and experts.

    Attributes:
        router: Megatron's.
        choices: that it has made.
        senders: None where an expert's rows need no sorting, or their order is unknown.
        counts: rows that each sender gave each expert in the last forward, [ranks][experts].
    """

    def __init__(self, moe: Any, topology: Topology) -> None:
        self.router = moe.router
        self.choices = Choices()
        self.counts: list[list[int]] = []
        self._group: dist.ProcessGroup = moe.token_dispatcher.tp_ep_group
        senders = _senders(moe.token_dispatcher, topology)
        self.senders = None if senders is None or senders.in_order else senders

    def count(self, module: Any, args: Any, output: Any) -> None:
        """All ranks of the group: hear of the router's forward how many rows will come."""
        if torch.is_grad_enabled():  # nobody watches a forward that is recomputed later
            sent = output[1].sum(dim=0, dtype=torch.int64)
            self.counts = _gathered(sent, self._group)

    def rows(self, expert: int, num_rows: int) -> list[list[range]] | None:
        """Return an expert's rows by data rank; None if they are not as the router said."""
        assert self.senders is not None
        counts = [sent[expert] for sent in self.counts]
        # Tokens over an expert's capacity are dropped, and rows are padded, after the router.
        return self.senders.rows(counts) if sum(counts) == num_rows else None


class _BySender:
    """An observer's observer: shows it the rows of each data rank by themselves."""

    def __init__(self, observer: Observer, layers: Mapping[str, _Layer]) -> None:
        self._observer = observer
        self._layers = layers

    def observe(
        self,
        placement: Placement,
        input: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """See `tap.Observer`."""
        layer = self._layers.get(placement.name.rpartition(".")[0])
        parts = None
        if layer is not None and layer.senders is not None and placement.expert is not None:
            parts = layer.rows(placement.expert, output.shape[0]) if not sequence_parallel else None
        if layer is None or layer.senders is None or parts is None:
            return self._observer.observe(placement, input, weight, output, sequence_parallel)
        rows = [torch.cat([_indices(r, output.device) for r in part]) for part in parts]
        shown: dict[int, torch.Tensor] = {}
        # A backward runs from the tap made last to the one made first: the first rank's is first.
        for i in reversed(range(len(rows))):
            place = replace(placement, shown=layer.senders.axis(i))
            shown[i] = self._observer.observe(
                place, input[rows[i]], weight, output[rows[i]], sequence_parallel
            )
        joined = torch.cat([shown[i] for i in range(len(rows))])
        return joined[torch.cat(rows).argsort()]


def _indices(rows: range, device: torch.device) -> torch.Tensor:
    return torch.arange(rows.start, rows.stop, device=device)


def _senders(dispatcher: Any, topology: Topology) -> Senders | None:
    """Return who is in the group that exchanges tokens, and in which order rows come.

    Known without asking (`Topology.places`): a rank that fails before it gets here leaves nobody
    waiting.
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
    return Senders(ranks, arrival, topology.data.size)


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """All ranks of the group: return every rank's integers, by rank."""
    own = values.to(torch.cuda.current_device())
    everyone = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everyone, own, group=group)
    found: list[list[int]] = everyone.view(group.size(), -1).tolist()
    return found
