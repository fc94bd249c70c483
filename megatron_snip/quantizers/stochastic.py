"""Random numbers of stochastic rounding: the same on every backend and in every parallel layout.

An element's number depends on a key, which names the tensor and the time, and on the element's
index in the GLOBAL tensor, and on nothing else:

    index   = row * global_cols + global_col
    counter = index // 8,  lane = index % 8

grad_output is rounded twice, for dgrad and for wgrad, from one draw: dgrad's copy of an element
takes the number of `index`, wgrad's copy that of `index ^ 4`, which is the number of a neighbor's
dgrad copy. An element's own two numbers are independent.

So results do not depend on block shape, on the order of work or on tensor-parallel sharding, and
recomputing a tensor draws the same numbers. A sharded linear's grad_output holds some of the global
columns: columns [rank * cols, (rank + 1) * cols), or, in a gated fc1 whose local columns are
[gate_r; up_r] while the global ones are [gate; up], one such range in each of two chunks. A rank
that holds some of a microbatch's tokens counts `row` from the microbatch's first token.

The generator is Philox4x32 with 7 rounds, the fewest that pass every test of BigCrush (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). A round maps (c0, c1, c2, c3) under the
key (k0, k1), all 32-bit words, to

    c0' = hi(B * c2) ^ c1 ^ k0      c1' = lo(B * c2)
    c2' = hi(A * c0) ^ c3 ^ k1      c3' = lo(A * c0)

after which k0 += 0x9E3779B9 and k1 += 0xBB67AE85 (mod 2^32). The words for counter (lo, hi, 0, 0)
are those of `triton.language.randint4x(key, counter, n_rounds=7)`. One counter serves 8 elements:
lane j is the 16-bit half j % 2 (low half first) of word j // 2, as a signed integer.
"""

import hashlib
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatron_snip.topology import Placement
from megatron_snip.types import Gemm

NUM_ROUNDS = 7
LANES = 8
"""Elements that share a counter: four 32-bit words of two halves each."""

_COUNTERS = 1 << 14
"""Counters drawn at once: their products fit into a cache."""

_MULTIPLIER_A = 0xD2511F53
_MULTIPLIER_B = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF

assert sys.byteorder == "little", "the lanes of a counter are laid out for little-endian machines"


@dataclass(frozen=True)
class StreamKey:
    """Names a tensor and a time: equal keys draw equal numbers, different keys unrelated ones.

    Attributes:
        seed: the run's seed.
        linear: the linear's name, the same on every rank (`types.linear_name`).
        iteration: Megatron's iteration, 1-based.
        microbatch: the microbatch's index within the iteration over ALL data- and context-parallel
            ranks, e.g. local_index * dp_size + dp_rank; these ranks hold different tokens and
            must not share numbers.
    """

    seed: int
    linear: str
    iteration: int
    microbatch: int

    @cached_property
    def word(self) -> int:
        """The 64-bit Philox key.

        It is BLAKE2b-64 of `seed|linear|iteration|microbatch` in ASCII, read little-endian.
        """
        text = f"{self.seed}|{self.linear}|{self.iteration}|{self.microbatch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class ColumnMap(NamedTuple):
    """Which columns of the global tensor a local one holds; kernels take the integers as they are.

    global column = (col // local_chunk) * global_chunk + col_start + col % local_chunk

    Attributes:
        global_cols: columns of the global tensor.
        local_chunk: columns of a chunk of the local tensor; a gated fc1 has two equal chunks.
        global_chunk: columns of a chunk of the global tensor.
        col_start: the shard's first column within a global chunk.
    """

    global_cols: int
    local_chunk: int
    global_chunk: int
    col_start: int

    @classmethod
    def shard(cls, local_cols: int, rank: int, world_size: int, num_chunks: int = 1) -> Self:
        """Return rank `rank`'s part of columns sharded evenly over `world_size`.

        Raises:
            ValueError: if `local_cols` is no multiple of `num_chunks`.
        """
        if local_cols % num_chunks:
            raise ValueError(f"{local_cols} columns do not divide into {num_chunks} chunks")
        chunk = local_cols // num_chunks
        return cls(local_cols * world_size, chunk, chunk * world_size, rank * chunk)

    @property
    def aligned(self) -> bool:
        """Whether 8 neighbors (from a multiple of 8) always share one counter."""
        return all(part % LANES == 0 for part in self)

    def columns(self, local: Tensor) -> Tensor:
        """Return the global columns of local ones (int64)."""
        if self.local_chunk == self.global_cols:
            return local
        chunk = local // self.local_chunk
        return chunk * self.global_chunk + self.col_start + local % self.local_chunk


@dataclass(frozen=True)
class StochasticStream:
    """The random numbers of one tensor: a key, and which part of the global tensor it holds.

    Attributes:
        key: names the tensor and the time.
        columns: which columns of the global tensor it holds; None means all of them.
        first_row: the global row of its row 0.
        swapped: whether the element `index` takes the number of `index ^ 4`.
        drawn: the numbers of all counters of a tensor, see `draw`; None: `bits16` draws them.
    """

    key: StreamKey
    columns: ColumnMap | None = None
    first_row: int = 0
    swapped: bool = False
    drawn: Tensor | None = None

    def for_gemm(self, gemm: Gemm) -> Self:
        """Return the stream of the copy that enters `gemm`."""
        return replace(self, swapped=gemm is Gemm.WGRAD)

    def column_map(self, cols: int) -> ColumnMap:
        """Return the columns of a local tensor that has `cols` of them."""
        columns = self.columns or ColumnMap(cols, cols, cols, 0)
        assert cols * columns.global_chunk == columns.local_chunk * columns.global_cols
        return columns

    def draw(self, rows: int, cols: int, device: torch.device | None = None) -> Self:
        """Return the stream with the numbers of a local [rows, cols] tensor drawn, for both copies.

        Where a chunk of columns or its offset is no multiple of 8, `bits16` draws them instead.
        """
        columns = self.column_map(cols)
        if not columns.aligned:
            return self
        if columns.global_cols == cols:
            per_row = cols // LANES
            first = self.first_row * per_row
            counters = torch.arange(first, first + rows * per_row, device=device)
        else:
            counters = self._index(rows, cols, LANES, device).flatten() // LANES
        return replace(self, drawn=random_bits16(counters, self.key.word))

    def bits16(self, rows: int, cols: int, device: torch.device | None = None) -> Tensor:
        """Return the numbers of a local [rows, cols] tensor, int16, the same on every device."""
        drawn = self.drawn
        if drawn is None:
            drawn = self.draw(rows, cols, device).drawn
        if drawn is None:  # 8 neighbors do not share a counter
            index = self._index(rows, cols, 1, device).flatten()
            parts = [self._numbers(part) for part in torch.split(index, _COUNTERS)]
            return torch.cat(parts).view(rows, cols)
        if self.swapped:
            drawn = drawn.view(torch.int64).flip(1).view(torch.int16)
        return drawn.view(rows, cols)

    def _numbers(self, index: Tensor) -> Tensor:
        """Return the number of each index, one by one."""
        lanes = random_bits16(index >> 3, self.key.word)
        lane = index & 7
        if self.swapped:
            lane = lane ^ 4
        return lanes.gather(-1, lane.unsqueeze(-1)).squeeze(-1)

    def _index(self, rows: int, cols: int, step: int, device: torch.device | None) -> Tensor:
        """Return the global indices of every `step`-th column, [rows, cols / step]."""
        columns = self.column_map(cols)
        local = columns.columns(torch.arange(0, cols, step, device=device))
        row = torch.arange(self.first_row, self.first_row + rows, device=device)
        return row.mul_(columns.global_cols).unsqueeze(1) + local


def grad_output_stream(
    seed: int, placement: Placement, iteration: int, microbatch: int, first_row: int = 0
) -> StochasticStream:
    """Return the stream of a linear's grad_output [M, N] in one microbatch.

    Args:
        seed: the run's seed.
        placement: which linear and shard; `column` shards the columns of grad_output.
        iteration: Megatron's iteration, 1-based.
        microbatch: its index within the iteration over all data- and context-parallel ranks.
        first_row: the index of grad_output's first token within the microbatch.
    """
    axis = placement.tp
    columns = None
    if placement.kind == "column":
        cols = placement.out_features // axis.size
        columns = ColumnMap.shard(cols, axis.shard, axis.size, placement.num_chunks)
    key = StreamKey(seed, placement.instance, iteration, microbatch)
    return StochasticStream(key, columns, first_row)


def random_bits16(counters: Tensor, key: int) -> Tensor:
    """Return 8 signed 16-bit random integers for each counter.

    Args:
        counters: [...], int64, non-negative.
        key: 64-bit unsigned, see `StreamKey.word`.

    Returns:
        [..., 8], int16, uniform over all 65536 values.
    """
    packed = torch.empty((*counters.shape, 2), dtype=torch.int64, device=counters.device)
    flat = counters.flatten()
    parts = torch.split(flat, _COUNTERS)
    for part, words in zip(parts, torch.split(packed.view(-1, 2), _COUNTERS), strict=True):
        _draw_words(part, key, words)
    return packed.view(torch.int16)


def _draw_words(counters: Tensor, key: int, words: Tensor) -> None:
    """Write the four 32-bit words of each counter [count] to `words`, int64 [count, 2]."""
    # On the CPU these are NumPy's operators, which start faster than PyTorch's.
    count: Any = counters if counters.is_cuda else counters.numpy()
    packed: Any = words if words.is_cuda else words.numpy()
    key0 = key & _WORD
    key1 = (key >> 32) & _WORD
    # The first round is written out: with c2 = c3 = 0 half of its products vanish.
    c3 = (count & _WORD) * _MULTIPLIER_A
    c2 = ((c3 >> 32) ^ key1) & _WORD
    c1 = 0 * count
    c0 = (count >> 32) ^ key0
    # The int64 products wrap, which leaves their 64 bits right. c1 and c3 hold the full product;
    # the mask after the xor removes what is above 32 bits.
    for _ in range(NUM_ROUNDS - 1):
        key0 = (key0 + _WEYL_0) & _WORD
        key1 = (key1 + _WEYL_1) & _WORD
        c0 *= _MULTIPLIER_A
        c2 *= _MULTIPLIER_B
        c1 ^= key0
        c1 ^= c2 >> 32
        c1 &= _WORD
        c3 ^= key1
        c3 ^= c0 >> 32
        c3 &= _WORD
        # The next round's (c0, c1, c2, c3), each in the memory of another one.
        c0, c1, c2, c3 = c1, c2, c3, c0
    packed[:, 0] = c0 | (c1 << 32)
    packed[:, 1] = c2 | (c3 << 32)
