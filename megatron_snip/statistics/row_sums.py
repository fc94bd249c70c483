"""The rows of one rank: what samples measured, scaled to all tokens of their microbatches.

While an iteration runs, the device adds up one vector for each linear, in two operations for each
microbatch. What the host knows is added at the end, and rows are put in order there.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_snip.log import log_failure
from megatron_snip.statistics.measure import NormSums, PartialSums, health_names, total_names
from megatron_snip.statistics.records import column_of
from megatron_snip.statistics.rows import ERROR_SQUARE, RowLayout
from megatron_snip.statistics.sample import MeasureSettings, Sample, to_device
from megatron_snip.statistics.sensitivity import Sensitivity
from megatron_snip.topology import Placement, Topology

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
        rows: The row of each linear (`RowLayout.row`), FP64 on the CPU, by the linear's name. Its
            norms are zeros: `reduce_sums` fills them in. `RowBuilder.finish` makes them.
        amax: The largest magnitudes of X, W and G, FP32 [3], by the linear's name.
        experts: The row of each expert (`RowLayout.expert_row`), FP64, by linear name and expert.
        counts: This rank's part of each linear's counts, by the linear's name.
        added: The sums of plugins' statistics (`added_names`), FP64, by the linear's name.
        added_maxima: Their maxima, FP32, by the linear's name.
        failed_statistics: The first error of each statistic of a plugin, by its name.
        failure: The first error, in one line, or None.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    amax: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    counts: dict[str, BatchCounts] = field(default_factory=dict)
    added: dict[str, Tensor] = field(default_factory=dict)
    added_maxima: dict[str, Tensor] = field(default_factory=dict)
    failed_statistics: dict[str, str] = field(default_factory=dict)
    failure: str | None = None

    def record_failure(self, error: Exception, where: str = "") -> None:
        """Remember the first error, while it is handled; its traceback is logged."""
        if self.failure is None:
            self.failure = where + log_failure(logger, "measuring", error, where.rstrip(": "))


class RowBuilder:
    """Adds up samples to the rows of this rank's linears and experts.

    Attributes:
        own: what was measured so far; its rows are made by `finish`.
    """

    def __init__(
        self,
        settings: MeasureSettings,
        topology: Topology,
        sensitivities: Mapping[Placement, Sensitivity],
    ) -> None:
        """Start without rows.

        Args:
            settings: what is measured.
            topology: this rank's place.
            sensitivities: as in `StepObserver`.
        """
        self._layout = RowLayout(settings.formats)
        self._has_products = settings.products
        # The measured statistics. Those of norms alone are the squares in the health sums.
        names = total_names if settings.products else health_names
        self._names = names(settings.formats)
        self._topology = topology
        self._sensitivities = sensitivities
        # Linears share their factors, unless they have tokens of their own, as experts do.
        self._factors = lru_cache(maxsize=32)(self._factors_of)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.own = RankRows()
        # Sums of `totals` times their factors, FP64 on the device; and what is not measured.
        self._totals: dict[str, Tensor] = {}
        self._known: dict[str, dict[str, float]] = {}
        self._updates_added: set[Placement] = set()

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
        largest = self.own.amax.get(placement.name)
        self.own.amax[placement.name] = amax if largest is None else torch.maximum(largest, amax)

    def add_added(
        self,
        placement: Placement,
        sample: Sample,
        sums: Tensor,
        maxima: Tensor,
        settings: MeasureSettings,
    ) -> None:
        """Add one microbatch to what plugins measure of a linear.

        Args:
            placement: the linear.
            sample: the tokens of the microbatch that were measured.
            sums: sums over all shards of the linear, in the order of `added_names`.
            maxima: those of this shard.
            settings: what is measured.
        """
        own = self.own
        largest = own.added_maxima.get(placement.name, maxima)
        own.added_maxima[placement.name] = torch.maximum(largest, maxima)  # a NaN stays one
        if placement.tp.rank != 0:
            return
        expansion = {**sample.expansions, "weight": 1.0 / self._topology.context}
        factors = [
            expansion[each.column.over]
            for _ in settings.formats
            for each in settings.added.values()
            if each.combine == "sum"
        ]
        scale = to_device(sums.device, torch.tensor(factors, dtype=torch.float64))
        _add_product(own.added, placement.name, sums.double(), scale)

    def add(
        self,
        placement: Placement,
        sample: Sample,
        sums: PartialSums | NormSums,
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
        tokens, dgrad, tiles = (sample.expansions[over] for over in ("tokens", "dgrad", "tiles"))
        factors = self._factors(tokens, dgrad, tiles * feature_stride, share, grad.device)
        values = sums.totals(grad)
        _add_product(self._totals, placement.name, values, factors)
        if placement.expert is not None:
            key = (placement.name, placement.expert)
            parts = [self._layout.expert_row(self._health_of(each)) for each in (values, factors)]
            _add_product(self.own.experts, key, *parts)
        known = self._known.setdefault(placement.name, defaultdict(float))
        for column, value in self._counts_and_update(placement, sample, share).items():
            known[column] += value

    def finish(self) -> RankRows:
        """Return what was measured, with the rows; waits for the device once.

        An error is recorded as a failure.
        """
        try:
            summed = torch.stack(list(self._totals.values())).cpu() if self._totals else ()
            columns = [self._layout.columns.index(name) for name in self._names]
            for name, values in zip(self._totals, summed, strict=True):
                known = self._known[name]
                statistics = values.new_tensor([known.get(c, 0.0) for c in self._layout.columns])
                health = self._health_of(values)
                if self._has_products:
                    statistics[columns] += values[: len(columns)]
                else:
                    statistics[columns] += health[..., ERROR_SQUARE].flatten()
                self.own.rows[name] = self._layout.row(statistics, health)
        except Exception as error:
            self.own.record_failure(error)
        return self.own

    def _health_of(self, values: Tensor) -> Tensor:
        """Return the health sums in what `sums.totals` returned, as `LinearSums.health`."""
        shape = self._layout.health_shape
        return values[-shape.numel() :].view(shape)

    def _factors_of(
        self,
        tokens: float,
        dgrad: float,
        tiles: float,
        share: float,
        device: torch.device,
    ) -> Tensor:
        """Return the factors from what `totals` returns to sums over all tokens, FP64."""
        # What a measured value stands for, by what its column is summed over (`Column.over`).
        expansion = {"tokens": tokens, "dgrad": dgrad, "tiles": tiles, "weight": share, "all": 1.0}
        factors = []
        for name in self._names if self._has_products else ():
            is_half = name.endswith("fisher")  # `fisher` and `aligned_fisher`
            factors.append(expansion[column_of(name).over] * (0.5 if is_half else 1.0))
        by_operand = torch.tensor([[tokens], [share], [dgrad]], dtype=torch.float64)  # X, W and G
        of_health = by_operand.expand(self._layout.health_shape).flatten()
        return to_device(device, torch.cat([of_health.new_tensor(factors), of_health]))

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


def _add_product(sums: dict[K, Tensor], key: K, values: Tensor, factors: Tensor) -> None:
    """Add values times their factors to what was added under a key."""
    if key in sums:
        sums[key].addcmul_(values, factors)
    else:
        sums[key] = values * factors
