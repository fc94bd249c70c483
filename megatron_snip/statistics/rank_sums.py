"""What one rank has measured: sums of samples, scaled to all tokens of their microbatches.

While an iteration runs, the device adds up one tensor for each linear. What the host knows is added
at the end.
"""

import logging
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_snip.kernels.launch import NUM_SUMS
from megatron_snip.log import log_failure
from megatron_snip.statistics.measure import ZEROED, OperandSums
from megatron_snip.statistics.sample import MeasureSettings, Sample, to_device
from megatron_snip.topology import Placement, Topology
from megatron_snip.types import Operand

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


class MeasuredCounts(NamedTuple):
    """What was measured of a linear.

    Attributes:
        microbatches: Number of microbatches; experts count each once for every expert.
        tokens: Number of tokens of these microbatches.
        weights: How often W was measured: by each rank that holds it, and of each expert.
        weight_square: The sum of |W|^2 of all rows, that often.
    """

    microbatches: float = 0.0
    tokens: float = 0.0
    weights: float = 0.0
    weight_square: float = 0.0


class RankSums:
    """Adds up samples to the sums of this rank's linears and experts.

    Attributes:
        sums: `OperandSums.sums` of each linear times factors to all tokens of the measured
            microbatches, by the linear's name; after `finish` on the CPU.
        experts: The first NUM_SUMS sums of each operand and format, [3, F + 1, NUM_SUMS], of each
            expert, by linear name and expert; after `finish` on the CPU.
        amax: The largest magnitudes of X, W and G, FP32 [3], by the linear's name.
        measured: This rank's part of what was measured, by the linear's name.
        counts: This rank's part of what the batch has, by the linear's name.
        added: The sums of plugins' statistics (`added_names`), FP64, by the linear's name.
        added_maxima: Their maxima, FP32, by the linear's name.
        failed_statistics: The first error of each statistic of a plugin, by its name.
        failure: The first error, in one line, or None.
    """

    def __init__(self, settings: MeasureSettings, topology: Topology) -> None:
        """Start with nothing.

        Args:
            settings: what is measured.
            topology: this rank's place.
        """
        self._settings = settings
        self._topology = topology
        # Linears share factors, unless they have tokens of their own, as experts do.
        self._factors = lru_cache(maxsize=32)(_factors_on)
        self.clear()

    def clear(self) -> None:
        """Forget all sums."""
        self.sums: dict[str, Tensor] = {}
        self.experts: dict[tuple[str, int], Tensor] = {}
        self.amax: dict[str, Tensor] = {}
        self.measured: dict[str, MeasuredCounts] = {}
        self.counts: dict[str, BatchCounts] = {}
        self.added: dict[str, Tensor] = {}
        self.added_maxima: dict[str, Tensor] = {}
        self.failed_statistics: dict[str, str] = {}
        self.failure: str | None = None
        # How many elements of X, W and G the sums stand for, FP64 [3] on the CPU.
        self._elements: dict[str | tuple[str, int], Tensor] = {}
        # Of each shard of W the linear's name, and its norm on the device.
        self._weight_norms: list[tuple[str, Tensor]] = []

    def record_failure(self, error: Exception, where: str = "") -> None:
        """Remember the first error, while it is handled; its traceback is logged."""
        if self.failure is None:
            self.failure = where + log_failure(logger, "measuring", error, where.rstrip(": "))

    def count(self, placement: Placement, num_tokens: int) -> None:
        """Count a backward of a linear in the batch, whether it is measured or not."""
        if placement.tp.rank != 0:  # one rank adds the sums of all shards, and counts for them
            return
        # The data ranks' microbatches are spread over the ranks that hold the weight: with expert
        # parallelism there are fewer of these. Context-parallel ranks share a microbatch.
        topology = self._topology
        num_ranks = topology.data_axis(placement).size * topology.context
        microbatches = topology.data.size / num_ranks / placement.num_calls
        before = self.counts.get(placement.name, BatchCounts(0.0, 0.0))
        self.counts[placement.name] = BatchCounts(
            before.microbatches + microbatches, before.tokens + num_tokens
        )

    def add(
        self, placement: Placement, sample: Sample, found: OperandSums, num_weight_rows: int
    ) -> None:
        """Add one microbatch to the sums of its linear, and to those of its expert.

        Args:
            placement: the linear.
            sample: the tokens of the microbatch that were measured.
            found: sums over all shards of the linear, and the largest magnitudes of this one.
            num_weight_rows: number of rows of W that were measured, over all shards; 0 for none.
        """
        name = placement.name
        largest = self.amax.get(name)
        self.amax[name] = found.amax if largest is None else torch.maximum(largest, found.amax)
        if placement.tp.rank != 0:
            return
        factors = self._factors(self._expansions(placement, sample), found.sums.device)
        _add_product(self.sums, name, found.sums, factors)
        rows = torch.tensor([sample.num_tokens, num_weight_rows, sample.num_tokens])
        features = [placement.in_features, placement.in_features, placement.out_features]
        elements = rows.double() * torch.tensor(features)
        self._elements[name] = self._elements.get(name, 0.0) + elements
        if placement.expert is not None:
            key = name, placement.expert
            _add_product(self.experts, key, found.sums[..., :NUM_SUMS], factors)
            self._elements[key] = self._elements.get(key, 0.0) + elements
        # Each context-parallel rank measures its own tokens of the same microbatch.
        before = self.measured.get(name, MeasuredCounts())
        self.measured[name] = before._replace(
            microbatches=before.microbatches + 1.0 / self._topology.context,
            tokens=before.tokens + sample.num_tokens,
            weights=before.weights + (num_weight_rows > 0),
        )

    def add_weight_norm(self, placement: Placement, norm: Tensor) -> None:
        """Add |W| of all rows of this shard, FP32, once in an iteration."""
        is_copy = placement.tp.size == 1 and placement.tp.rank != 0
        if not is_copy:
            self._weight_norms.append((placement.name, norm))

    def add_added(self, placement: Placement, sample: Sample, sums: Tensor, maxima: Tensor) -> None:
        """Add one microbatch to what plugins measure of a linear.

        Args:
            placement: the linear.
            sample: the tokens of the microbatch that were measured.
            sums: sums over all shards of the linear, in the order of `added_names`.
            maxima: those of this shard.
        """
        largest = self.added_maxima.get(placement.name, maxima)
        self.added_maxima[placement.name] = torch.maximum(largest, maxima)  # a NaN stays one
        if placement.tp.rank != 0:
            return
        expansions = dict(zip(Operand, self._expansions(placement, sample), strict=True))
        # Each context-parallel rank adds W for the same microbatch.
        expansions[Operand.WEIGHT] = 1.0 / self._topology.context
        factors = [
            expansions[each.operand]
            for _ in self._settings.formats
            for each in self._settings.added.values()
            if each.combine == "sum"
        ]
        scale = to_device(sums.device, torch.tensor(factors, dtype=torch.float64))
        _add_product(self.added, placement.name, sums.double(), scale)

    def finish(self) -> None:
        """Add what the host knows; waits for the device. An error is recorded as a failure."""
        try:
            self._complete(self.sums)
            self._complete(self.experts)
            if self._weight_norms:
                norms = torch.stack([norm for _, norm in self._weight_norms]).tolist()
                for (name, _), norm in zip(self._weight_norms, norms, strict=True):
                    before = self.measured.get(name, MeasuredCounts())
                    square = before.weight_square + norm**2
                    self.measured[name] = before._replace(weight_square=square)
        except Exception as error:
            self.record_failure(error)

    def _complete(self, table: dict[Any, Tensor]) -> None:
        if table:
            moved = torch.stack(list(table.values())).cpu()
            for key, sums in zip(table, moved, strict=True):
                sums[:, -1, ZEROED] += self._elements[key]
                table[key] = sums

    @staticmethod
    def _expansions(placement: Placement, sample: Sample) -> tuple[float, float, float]:
        """Return the factors from sums over the sampled rows of X, W and G, and all shards."""
        tokens = sample.expansion
        # Every shard holds X (column-parallel) or G (row-parallel) in full; it must count once.
        once = tokens / placement.tp.size
        return (once, 1.0, tokens) if placement.kind == "column" else (tokens, 1.0, once)


def _factors_on(factors: tuple[float, float, float], device: torch.device) -> Tensor:
    """Return factors of X, W and G on a device, FP64 [3, 1, 1]."""
    return to_device(device, torch.tensor(factors, dtype=torch.float64)[:, None, None])


def _add_product(sums: dict[K, Tensor], key: K, values: Tensor, factors: Tensor) -> None:
    """Add values times their factors to what was added under a key."""
    if key in sums:
        sums[key].addcmul_(values, factors)
    else:
        sums[key] = values * factors
