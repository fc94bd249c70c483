"""Which tokens, and which rows of W, an observed iteration measures; the same in every layout.

Of a batch of many microbatches, the first ones are measured (`is_measured`). In each of these,
single tokens are drawn at random. Of W, which no microbatch changes, a quarter of the row tiles is
drawn, once in an iteration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quantizers.stochastic import ColumnMap, StreamKey
from megatron_snip.statistics.added import Statistic, added_statistics
from megatron_snip.topology import Axis, Topology

TOKENS_PER_SAMPLE = 16
"""One of so many tokens of a microbatch is measured."""

LEAST_TOKENS = 64
"""Least number of tokens of a microbatch that are measured."""

MOST_TOKENS = 512
"""Largest number of tokens of a microbatch that are measured."""

MOST_MICROBATCHES = 32
"""Largest number of microbatches of a batch, over all data ranks, that are measured."""

WEIGHT_TILES_PER_SAMPLE = 4
"""One of so many row tiles of W is measured. |W|^2 is that of all rows, so that the tiles give the
relative error alone."""


@dataclass(frozen=True)
class MeasureSettings:
    """What a measurement observes.

    Attributes:
        formats: How operands are quantized, by each format name that a plan may use.
        iteration: Megatron's iteration, 1-based.
        seed: The seed of the run.
        names: Names of the linears to observe; None observes all.
        all_tokens: Whether to measure all tokens of all microbatches and all rows of W, and not a
            sample (for benchmarks).
        num_experts: Number of experts of each linear that has any, over all ranks. One rank alone
            need not give it.
        added: The statistics that plugins add, by name; in the same order on all ranks.
    """

    formats: Mapping[str, Format]
    iteration: int
    seed: int
    names: frozenset[str] | None = None
    all_tokens: bool = False
    num_experts: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, Statistic] = field(default_factory=added_statistics)


@dataclass(frozen=True)
class OwnRows:
    """The rows of a sample that this rank holds.

    Attributes:
        values: [H, features], the rows.
        places: int64 [H] on the CPU: where they stand among the sample's rows.
        num_rows: Number of the sample's rows, over all ranks.
    """

    values: Tensor
    places: Tensor
    num_rows: int

    def with_zeros(self) -> Tensor:
        """Return all the sample's rows, [num_rows, features]; zeros for those of other ranks."""
        if len(self.places) == self.num_rows:
            return self.values  # the places ascend, so this is their order
        found = self.values.new_zeros((self.num_rows, self.values.shape[1]))
        found[to_device(found.device, self.places)] = self.values
        return found


class OwnPlaces(NamedTuple):
    """Which of a sample's rows a rank holds.

    Attributes:
        rows: int64 [H], their indices in the rank's own matrix, on the matrix's device.
        places: int64 [H] on the CPU: `OwnRows.places`.
    """

    rows: Tensor
    places: Tensor


class SampledRows:
    """The rows of a sample. Linears share them, so what depends on a rank is found once.

    Attributes:
        indices: int64 [rows] on the CPU: indices of tokens, over the tokens of all ranks.
    """

    def __init__(self, indices: Tensor) -> None:
        """Find nothing yet."""
        self.indices = indices
        self._own: dict[tuple[range | None, torch.device], OwnPlaces] = {}

    def __len__(self) -> int:
        """Return the number of rows, over all ranks."""
        return len(self.indices)

    def of_rank(self, tokens: range | None, device: torch.device) -> OwnPlaces:
        """Return which of the rows are among a rank's tokens; None for all tokens."""
        key = tokens, device
        if key not in self._own:
            rows = self.indices
            places = torch.arange(len(rows))
            if tokens is not None:
                rows = rows - tokens.start
                places = ((rows >= 0) & (rows < len(tokens))).nonzero().squeeze(1)
                rows = rows[places]
            self._own[key] = OwnPlaces(to_device(device, rows), places)
        return self._own[key]


@dataclass
class Sample:
    """Sampled tokens of one microbatch, stored in the forward for the backward.

    Attributes:
        index: Index of the microbatch within the iteration, over all ranks; where a linear is
            called several times in a microbatch, index of the call.
        num_tokens: Number of tokens of the microbatch, over all ranks of the tensor axis.
        rows: The sampled tokens.
        input: X of the sample's rows that this rank holds.
    """

    index: int
    num_tokens: int
    rows: SampledRows
    input: OwnRows | None = None

    @property
    def expansion(self) -> float:
        """Factor from sums over the sampled tokens to sums over all tokens."""
        return self.num_tokens / len(self.rows) if len(self.rows) else 1.0


def is_measured(
    settings: MeasureSettings, topology: Topology, microbatch: int, num_ranks: int
) -> bool:
    """Return whether a microbatch is measured: whether it is one of the first of a batch.

    Every layout measures the same ones, and a rank at most one more than another rank.

    Args:
        settings: What is observed.
        topology: This rank's place.
        microbatch: Its index. Microbatches are numbered over the ranks that hold the same weight in
            turn: of two, rank 0 has 0, 2, 4 ..
        num_ranks: Number of these ranks. Those of an expert's weight may be fewer than the data
            ranks, or more.
    """
    if settings.all_tokens:
        return True
    # In other words: microbatch / num_ranks < MOST_MICROBATCHES * context / data.size. Ranks that
    # share each microbatch (context) are data ranks too.
    return microbatch * topology.data.size < MOST_MICROBATCHES * topology.context * num_ranks


def draw_sample(settings: MeasureSettings, num_tokens: int, index: int) -> Sample:
    """Return the sample of a microbatch, without X; its rows are of all ranks' tokens together.

    Args:
        settings: What is observed; its seed and iteration decide which tokens are drawn.
        num_tokens: Number of tokens of the microbatch, over all ranks of the tensor axis.
        index: `Sample.index`.
    """
    wanted = min(max(num_tokens // TOKENS_PER_SAMPLE, LEAST_TOKENS), MOST_TOKENS)
    rows = torch.arange(num_tokens)
    if not settings.all_tokens and wanted < num_tokens:
        key = StreamKey(settings.seed, "sampled tokens", settings.iteration, index)
        rows = _permutation(num_tokens, key)[:wanted]
    return Sample(index, num_tokens, SampledRows(rows))


class WeightRows(NamedTuple):
    """Which rows of W are measured.

    Attributes:
        own: int64 [R], those that this shard holds, as indices of its own rows; None for all.
        num_rows: Number of rows over all shards.
    """

    own: Tensor | None
    num_rows: int


def draw_weight_rows(settings: MeasureSettings, columns: ColumnMap) -> WeightRows:
    """Return the rows of W that are measured, on the CPU: complete tiles of the unsharded W.

    So formats with blocks of rows are measured exactly, if shards do not divide the blocks.

    Args:
        settings: What is observed; its seed and iteration decide which tiles are drawn.
        columns: Which columns of grad_output, and so which rows of W, the shard holds.
    """
    num_rows = columns.global_cols
    tile = max((fmt.weight_block[0] for fmt in settings.formats.values()), default=1)
    num_tiles = math.ceil(num_rows / tile)
    wanted = math.ceil(num_tiles / WEIGHT_TILES_PER_SAMPLE)
    if settings.all_tokens or wanted == num_tiles:
        return WeightRows(None, num_rows)
    key = StreamKey(settings.seed, "sampled rows of W", settings.iteration, 0)
    is_drawn = torch.zeros(num_tiles, dtype=torch.bool)
    is_drawn[_permutation(num_tiles, key)[:wanted]] = True
    rows = torch.arange(num_rows)
    num_own = num_rows // (columns.global_chunk // columns.local_chunk)
    own = is_drawn[columns.columns(rows[:num_own]) // tile].nonzero().squeeze(1)
    return WeightRows(own, int(is_drawn[rows // tile].sum()))


def _permutation(count: int, key: StreamKey) -> Tensor:
    generator = torch.Generator().manual_seed(key.word >> 1)  # a seed has 63 bits
    return torch.randperm(count, generator=generator)


def rows_of(matrix: Tensor, rows: SampledRows, is_split: bool, axis: Axis) -> OwnRows:
    """Return those of a sample's rows that this rank holds.

    Args:
        matrix: The matrix, [tokens of this rank, features].
        rows: The rows; where tokens are split, of the tokens of all ranks.
        is_split: Whether each rank of `axis` holds other tokens.
        axis: The tensor axis.
    """
    count = matrix.shape[0]
    tokens = range(axis.rank * count, (axis.rank + 1) * count) if is_split else None
    own = rows.of_rank(tokens, matrix.device)
    return OwnRows(matrix.index_select(0, own.rows), own.places, len(rows))


def to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU on `device`, without waiting for the device."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
