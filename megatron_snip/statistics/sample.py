"""Which tokens and output features an observed iteration measures; the same in every layout.

Of a batch of many microbatches, the first ones are measured (`is_measured`). In each of these,
single tokens are drawn at random for fprop; a quarter of them serve dgrad. wgrad is measured on
complete tiles of consecutive tokens and, of wide linears, on every fourth output feature. Where
norms alone are measured, all operands are measured on the single tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
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

DGRAD_STRIDE = 4
"""dgrad is measured on one of so many of these tokens: health reports it, and no score uses it."""

FEATURE_STRIDE = 4
"""wgrad is measured on every fourth output feature, where `FEATURE_MULTIPLE` allows it."""

FEATURE_MULTIPLE = 256
"""wgrad leaves out features only of linears whose number of output features (of a gated fc1: in
each chunk) is a multiple of this. Then the shards of up to 64 ranks begin at a multiple of four."""


@dataclass(frozen=True)
class MeasureSettings:
    """What a measurement observes.

    Attributes:
        formats: How operands are quantized, by each format name that a plan may use.
        iteration: Megatron's iteration, 1-based.
        seed: The seed of the run.
        names: Names of the linears to observe; None observes all.
        all_tokens: Whether to measure all tokens of all microbatches and not a sample (for
            benchmarks).
        products: Whether to measure the errors of products, and not norms alone.
        num_experts: Number of experts of each linear that has any, over all ranks. One rank alone
            need not give it.
        added: The statistics that plugins add, by name; in the same order on all ranks.
    """

    formats: Mapping[str, Format]
    iteration: int
    seed: int
    names: frozenset[str] | None = None
    all_tokens: bool = False
    products: bool = True
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
        rows: S single tokens, then the R tokens of complete tiles. Where all tokens are measured,
            S = R = num_tokens: `rows` has each token once. Of norms alone R = 0.
        single: Which of `rows` are the single tokens.
        of_dgrad: Which of the single tokens dgrad is measured on.
        in_tiles: Which of `rows` are the tokens of complete tiles.
        first_feature: The first output feature that wgrad is measured on; None leaves none out.
        expansions: Factors from sums over the measured tokens to sums over all tokens, by what
            `Column.over` calls them: `tokens`, `dgrad` and `tiles`.
        input: X of the sample's rows that this rank holds.
    """

    index: int
    num_tokens: int
    rows: SampledRows
    single: slice
    of_dgrad: slice
    in_tiles: slice
    first_feature: int | None
    expansions: Mapping[str, float]
    input: OwnRows | None = None


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

    A microbatch whose tokens the rounded-up sample covers is measured completely.

    Args:
        settings: What is observed; its seed and iteration decide which tokens are drawn.
        num_tokens: Number of tokens of the microbatch, over all ranks of the tensor axis.
        index: `Sample.index`.
    """
    tile = max((fmt.tile for fmt in settings.formats.values()), default=1)
    wanted = min(max(num_tokens // TOKENS_PER_SAMPLE, LEAST_TOKENS), MOST_TOKENS)
    num_tiles = math.ceil(num_tokens / tile)
    num_chosen = math.ceil(wanted / tile)
    # All tokens, once each, unless some can be left out.
    rows = torch.arange(num_tokens)
    single = of_dgrad = slice(None)
    in_tiles = slice(None) if settings.products else slice(0, 0)
    first_feature = None
    expansions = {"tokens": 1.0, "dgrad": 1.0, "tiles": 1.0}
    if not settings.all_tokens and num_chosen < num_tiles:
        word = StreamKey(settings.seed, "sampled tokens", settings.iteration, index).word
        generator = torch.Generator().manual_seed(word >> 1)  # a seed has 63 bits
        drawn = torch.randperm(num_tokens, generator=generator)[:wanted]
        if not settings.products:
            expansions = dict.fromkeys(expansions, num_tokens / wanted)
            singles = SampledRows(drawn)
            return Sample(index, num_tokens, singles, single, of_dgrad, in_tiles, None, expansions)
        chosen = torch.randperm(num_tiles, generator=generator)[:num_chosen].sort().values
        tiled = (chosen[:, None] * tile + torch.arange(tile)).reshape(-1)
        rows = torch.cat([drawn, tiled[tiled < num_tokens]])
        single = slice(wanted)
        of_dgrad = slice(wanted // DGRAD_STRIDE)
        in_tiles = slice(wanted, None)
        key = StreamKey(settings.seed, "sampled features", settings.iteration, 0)
        first_feature = (key.word + index) % FEATURE_STRIDE  # four microbatches cover all
        expansions = {
            "tokens": num_tokens / wanted,
            "dgrad": num_tokens / (wanted // DGRAD_STRIDE),
            "tiles": num_tiles / num_chosen,
        }
    return Sample(
        index, num_tokens, SampledRows(rows), single, of_dgrad, in_tiles, first_feature, expansions
    )


def sampled_features(stream: StochasticStream, cols: int, first: int | None) -> slice:
    """Return the output features of this shard that wgrad is measured on.

    Args:
        stream: The stream of grad_output; it knows which output features of the linear the shard
            holds.
        cols: Number of output features of the shard.
        first: `Sample.first_feature`.
    """
    if first is None or stream.column_map(cols).global_chunk % FEATURE_MULTIPLE:
        return slice(None)
    return slice(first, None, FEATURE_STRIDE)


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


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def constant(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Return integers on a device, int64; the same tensor each time, which is not written to."""
    return to_device(device, torch.tensor(numbers))
