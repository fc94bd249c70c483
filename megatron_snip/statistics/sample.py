"""Which tokens and output features an observed iteration measures; the same in every layout.

Single tokens are drawn at random for fprop and dgrad. wgrad is measured on complete tiles of
consecutive tokens and, of wide linears, on every fourth output feature.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.topology import Axis

TOKENS_PER_SAMPLE, LEAST_TOKENS, MOST_TOKENS = 16, 64, 512
"""1/16 of a microbatch's tokens is measured, at least 64 and at most 512."""

FEATURE_STRIDE, FEATURE_MULTIPLE = 4, 256
"""wgrad is measured on every fourth output feature of linears that have a multiple of 256
(a gated fc1: in each chunk). Then the shards of up to 64 ranks begin at a multiple of four."""


@dataclass(frozen=True)
class MeasureSettings:
    """What a measurement observes.

    Attributes:
        formats: how operands are quantized under each format name that a plan may use.
        iteration: Megatron's, 1-based.
        seed: the run's seed.
        names: linears to observe; None observes all.
        all_tokens: measure all tokens and not a sample (benchmarks).
    """

    formats: Mapping[str, Format]
    iteration: int
    seed: int
    names: frozenset[str] | None = None
    all_tokens: bool = False


@dataclass
class Sample:
    """Sampled tokens of one microbatch, stored in the forward for the backward.

    Attributes:
        microbatch: global index of the microbatch within the iteration.
        num_tokens: tokens of the microbatch, over all ranks of the tensor axis.
        rows: [S + R] int64: S single tokens, then the R tokens of complete tiles.
        num_single: S.
        first_feature: the first that wgrad is measured on; None: no features are left out.
        expansions: factors from sums over the S and over the R tokens to those over all.
        input: X of the sample; zeros for tokens of other ranks, where tokens are split.
        input_amax: of all tokens of this shard, where a format needs it.
        rotated_amax: likewise, after the Hadamard transform.
        forward_scales: those of delayed scaling, of X and W, in the forward.
    """

    microbatch: int
    num_tokens: int
    rows: Tensor
    num_single: int
    first_feature: int | None
    expansions: tuple[float, float]
    input: Tensor | None = None
    input_amax: Tensor | None = None
    rotated_amax: Tensor | None = None
    forward_scales: Tensor | None = None


def draw_sample(s: MeasureSettings, num_tokens: int, microbatch: int) -> Sample:
    """Return the sample of a microbatch, without X; its rows are of all ranks' tokens together.

    A microbatch whose tokens the rounded-up sample covers is measured completely: `rows` then has
    every token twice.

    Args:
        s: what is observed; its seed and iteration decide which tokens are drawn.
        num_tokens: of the microbatch, over all ranks of the tensor axis.
        microbatch: its global index within the iteration.
    """
    tile = max((fmt.tile for fmt in s.formats.values()), default=1)
    wanted = min(max(num_tokens // TOKENS_PER_SAMPLE, LEAST_TOKENS), MOST_TOKENS)
    num_tiles = math.ceil(num_tokens / tile)
    num_chosen = math.ceil(wanted / tile)
    single = runs = torch.arange(num_tokens)
    first_feature = None
    expansions = (1.0, 1.0)
    if not s.all_tokens and num_chosen < num_tiles:
        word = StreamKey(s.seed, "sampled tokens", s.iteration, microbatch).word
        generator = torch.Generator().manual_seed(word >> 1)  # a seed has 63 bits
        single = torch.randperm(num_tokens, generator=generator)[:wanted]
        chosen = torch.randperm(num_tiles, generator=generator)[:num_chosen].sort().values
        runs = (chosen[:, None] * tile + torch.arange(tile)).reshape(-1)
        runs = runs[runs < num_tokens]
        key = StreamKey(s.seed, "sampled features", s.iteration, 0)
        first_feature = (key.word + microbatch) % FEATURE_STRIDE  # four microbatches cover all
        expansions = num_tokens / wanted, num_tiles / num_chosen
    rows = torch.cat([single, runs])
    return Sample(microbatch, num_tokens, rows, len(single), first_feature, expansions)


def sampled_features(stream: StochasticStream, cols: int, first: int | None) -> slice:
    """Return the output features of this shard that wgrad is measured on.

    Args:
        stream: of grad_output; it knows which output features of the linear the shard holds.
        cols: how many it holds.
        first: `Sample.first_feature`.
    """
    if first is None or stream.column_map(cols).global_chunk % FEATURE_MULTIPLE:
        return slice(None)
    return slice(first, None, FEATURE_STRIDE)


def rows_of(matrix: Tensor, rows: Tensor, is_split: bool, axis: Axis) -> Tensor:
    """Return rows of a matrix; zeros for those of other ranks, where its rows are split.

    Args:
        matrix: [tokens of this rank, features].
        rows: indices, of all ranks' tokens if they are split.
        is_split: whether each rank of `axis` holds other tokens.
        axis: the tensor axis.
    """
    if not is_split:
        return matrix[to_device(matrix.device, rows)]
    first = axis.rank * matrix.shape[0]
    here = ((rows >= first) & (rows < first + matrix.shape[0])).nonzero().squeeze(1)
    found = matrix.new_zeros((len(rows), matrix.shape[1]))
    found[to_device(matrix.device, here)] = matrix[to_device(matrix.device, rows[here] - first)]
    return found


def to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU on `device`, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
