"""The rows of one rank: what samples measured, scaled to all tokens of their microbatches."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.log import log_failure
from megatron_snip.statistics.measure import PartialSums, total_names, totals
from megatron_snip.statistics.records import column_of
from megatron_snip.statistics.rows import RowLayout
from megatron_snip.statistics.sample import Sample, to_device
from megatron_snip.statistics.sensitivity import Sensitivity
from megatron_snip.topology import LinearKind, Placement, Topology

logger = logging.getLogger(__name__)

K = TypeVar("K")


class BatchCounts(NamedTuple):
    """What a linear multiplied in the batch, measured or not.

    Attributes:
        microbatches: Number of microbatches; experts count each once for every expert.
        tokens: Number of tokens.
    """

    microbatches: float
    tokens: float


@dataclass
class RankRows:
    """What one rank has measured in an iteration.

    Attributes:
        rows: The row of each linear (`RowLayout.row`), FP64, by the linear's name. Its norms are
            zeros: `reduce_sums` fills them in.
        amax: The largest magnitudes of X, W and G, FP32 [3], by the linear's name.
        experts: The row of each expert (`RowLayout.expert_row`), FP64, by linear name and expert.
        counts: This rank's part of each linear's counts, by the linear's name.
        failure: The first error, in one line, or None.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    amax: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    counts: dict[str, BatchCounts] = field(default_factory=dict)
    failure: str | None = None

    def record_failure(self, error: Exception, where: str = "") -> None:
        """Remember the first error, while it is handled; its traceback is logged."""
        if self.failure is None:
            self.failure = where + log_failure(logger, "measuring", error, where.rstrip(": "))


class RowBuilder:
    """Adds up samples to the rows of this rank's linears and experts.

    Attributes:
        own: the rows so far.
    """

    def __init__(
        self,
        formats: Mapping[str, Format],
        topology: Topology,
        sensitivities: Mapping[Placement, Sensitivity],
    ) -> None:
        """Start without rows.

        Args:
            formats: what is measured under each name.
            topology: this rank's place.
            sensitivities: as in `StepObserver`.
        """
        self.own = RankRows()
        self._formats = formats
        self._layout = RowLayout(formats)
        self._sums_over = [column_of(name).over for name in self._layout.columns]
        self._places = {kind: self._places_of(kind) for kind in get_args(LinearKind)}
        self._topology = topology
        self._sensitivities = sensitivities
        self._updates_added: set[Placement] = set()

    def clear(self) -> None:
        """Forget all rows."""
        self.own = RankRows()
        self._updates_added.clear()

    def count(self, placement: Placement, num_tokens: int) -> None:
        """Count a backward of a linear in the batch, whether it is measured or not."""
        if placement.tp.rank != 0:  # one rank adds the row of all shards, and counts for them
            return
        # The data ranks' microbatches are spread over the ranks that hold the weight: with expert
        # parallelism there are fewer of these. Context-parallel ranks share a microbatch.
        topology = self._topology
        num_ranks = topology.data_axis(placement).size * topology.context
        microbatches = topology.data.size / num_ranks / placement.num_calls
        before = self.own.counts.get(placement.name, BatchCounts(0.0, 0.0))
        self.own.counts[placement.name] = BatchCounts(
            before.microbatches + microbatches, before.tokens + num_tokens
        )

    def add_amax(self, placement: Placement, amax: Tensor) -> None:
        """Keep the largest magnitudes of X, W and G, FP32 [3]."""
        largest = self.own.amax.get(placement.name, amax)
        self.own.amax[placement.name] = torch.maximum(largest, amax)

    def add(
        self,
        placement: Placement,
        sample: Sample,
        sums: PartialSums,
        grad: Tensor,
        *,
        feature_stride: int,
    ) -> None:
        """Add one microbatch to the row of its linear, and to that of its expert.

        Args:
            placement: the linear.
            sample: the tokens of the microbatch that were measured.
            sums: sums over all shards of the linear.
            grad: G [S, N] of the sample's single tokens, on this shard.
            feature_stride: 4 if wgrad is measured on every fourth output feature; 1 for all.
        """
        # Each context-parallel rank measures its own tokens of the same microbatch. What counts
        # once for each microbatch, such as |W|^2, each of these ranks adds with factor 1 / CP.
        share = 1.0 / self._topology.context
        # What a measured value stands for, by what its column is summed over (`Column.over`).
        expansion = {
            **sample.expansions,
            "tiles": sample.expansions["tiles"] * feature_stride,
            "weight": share,
            "all": 1.0,
        }
        known = self._counts_and_update(placement, sample, share)
        # What the host knows goes to the device in one transfer.
        host = [
            [expansion[over] for over in self._sums_over],
            [known.get(name, 0.0) for name in self._layout.columns],
            self._places[placement.kind],
        ]
        factors, known_values, order = to_device(
            grad.device, torch.tensor(host, dtype=torch.float64)
        )
        values = totals(sums, grad)
        found = torch.cat([values, values.new_zeros(1)]).index_select(0, order.long())
        statistics = found * factors + known_values
        by_operand = torch.tensor(
            [[expansion["tokens"]], [expansion["weight"]], [expansion["dgrad"]]],  # X, W and G
            dtype=torch.float64,
        )
        health = sums.health.double() * to_device(grad.device, by_operand)
        if placement.expert is not None:
            key = (placement.name, placement.expert)
            _add_to(self.own.experts, key, self._layout.expert_row(health))
        _add_to(self.own.rows, placement.name, self._layout.row(statistics, health))

    def _places_of(self, kind: LinearKind) -> list[int]:
        """Return where each column stands in what `totals` returns for a kind of linears.

        Columns that are not measured stand behind the last.
        """
        names = total_names(kind, self._formats)
        places = {name: i for i, name in enumerate(names)}
        return [places.get(name, len(names)) for name in self._layout.columns]

    def _counts_and_update(
        self, placement: Placement, sample: Sample, share: float
    ) -> dict[str, float]:
        """Return what a microbatch adds without being measured, by column: counts and |update|^2.

        Args:
            placement: the linear.
            sample: the measured tokens of the microbatch.
            share: the part of the microbatch that counts on this rank, 1 / CP.
        """
        known = {"microbatches": share, "tokens": float(sample.num_tokens)}
        # A weight's update is added once, and not in every microbatch and on every data rank.
        was_added = placement in self._updates_added
        if not was_added and self._topology.data_axis(placement).rank == 0:
            sensitivity = self._sensitivities.get(placement)
            known["update_square"] = 0.0 if sensitivity is None else sensitivity.update_square
        self._updates_added.add(placement)
        return known


def _add_to(rows: dict[K, Tensor], key: K, row: Tensor) -> None:
    """Add a row to what was added under its key."""
    rows[key] = rows[key] + row if key in rows else row
