"""Which random number an element draws in stochastic rounding.

An element's number depends on a key, which says whose tensor it is and when, and on the element's
index in the GLOBAL tensor, and on nothing else:

    index   = global_row * global_cols + global_col
    counter = index // 8,  lane = index % 8            (see `philox`)

So results do not depend on block shape, on the order of work or on tensor-parallel sharding, and
recomputing a tensor replays its numbers. A sharded linear's grad_output holds some of the global
columns: columns [rank * cols, (rank + 1) * cols), or, in a gated fc1 whose local columns are
[gate_r; up_r] while the global ones are [gate; up], one such range in each of two chunks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from megatron_snip.quantizers.philox import LANES, random_bits16
from megatron_snip.types import Gemm, Operand


@dataclass(frozen=True)
class StreamKey:
    """Whose random numbers: equal keys draw equal numbers, different keys unrelated ones.

    Attributes:
        seed: the run's seed.
        linear: the linear's name, the same on every rank (`types.linear_name`).
        step: training step, 0-based.
        microbatch: the microbatch's index within the step over ALL data- and context-parallel
            ranks, e.g. local_index * dp_size + dp_rank; these ranks hold different tokens and
            must not share numbers.
        role: which copy of the tensor, e.g. `grad_output.wgrad`; the copies of grad_output for
            dgrad and for wgrad round independently. `StochasticStream.for_role` sets it.
    """

    seed: int
    linear: str
    step: int
    microbatch: int
    role: str = ""

    @property
    def word(self) -> int:
        """The 64-bit Philox key.

        It is BLAKE2b-64 of `seed|linear|step|microbatch|role` in ASCII, read little-endian.
        """
        return _hash_word(f"{self.seed}|{self.linear}|{self.step}|{self.microbatch}|{self.role}")


@lru_cache(maxsize=4096)
def _hash_word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class StreamLayout:
    """Where a local [rows, cols] tensor lies in the global one.

    Attributes:
        global_cols: columns of the global tensor; None says that no column is sharded.
        col_start: this shard's first column within each chunk of the global tensor.
        num_chunks: equal chunks that local and global columns fall into; 2 for a gated fc1.
        row_start: global row of the first local row.
    """

    global_cols: int | None = None
    col_start: int = 0
    num_chunks: int = 1
    row_start: int = 0

    @classmethod
    def shard(
        cls, local_cols: int, rank: int, world_size: int, num_chunks: int = 1
    ) -> StreamLayout:
        """Layout of rank `rank`'s part of columns sharded evenly over `world_size` ranks.

        Raises:
            ValueError: if `local_cols` is no multiple of `num_chunks`.
        """
        if local_cols % num_chunks:
            raise ValueError(f"{local_cols} columns do not divide into {num_chunks} chunks")
        return cls(local_cols * world_size, rank * (local_cols // num_chunks), num_chunks)

    def column_map(self, cols: int) -> ColumnMap:
        """Resolve this layout for a local tensor of `cols` columns.

        Raises:
            ValueError: if the columns do not fit into the global tensor.
        """
        total = cols if self.global_cols is None else self.global_cols
        if cols % self.num_chunks or total % self.num_chunks:
            raise ValueError(
                f"{cols} local and {total} global columns must divide into {self.num_chunks} chunks"
            )
        local_chunk, global_chunk = cols // self.num_chunks, total // self.num_chunks
        if self.col_start + local_chunk > global_chunk:
            raise ValueError(
                f"columns [{self.col_start}, {self.col_start + local_chunk}) lie outside the "
                f"{global_chunk} global columns of a chunk"
            )
        return ColumnMap(total, local_chunk, global_chunk, self.col_start, self.row_start)


@dataclass(frozen=True)
class ColumnMap:
    """The integers that take a local (row, col) to its global index; kernels get these.

    index = (row_start + row) * global_cols
          + (col // local_chunk) * global_chunk + col_start + col % local_chunk
    """

    global_cols: int
    local_chunk: int
    global_chunk: int
    col_start: int
    row_start: int

    @cached_property
    def aligned(self) -> bool:
        """Whether 8 neighbours (from a multiple of 8) always share one counter."""
        parts = (self.global_cols, self.local_chunk, self.global_chunk, self.col_start)
        return all(part % LANES == 0 for part in parts)

    def columns(self, local: Tensor) -> Tensor:
        """Global columns of local ones (int64)."""
        if self.local_chunk == self.global_cols:
            return local
        chunk = local // self.local_chunk
        return chunk * self.global_chunk + self.col_start + local % self.local_chunk


@dataclass(frozen=True)
class StochasticStream:
    """The random numbers of one tensor: a key and the tensor's place in the global one."""

    key: StreamKey
    layout: StreamLayout = field(default_factory=StreamLayout)

    def for_role(self, operand: Operand, gemm: Gemm) -> StochasticStream:
        """The stream of `operand`'s copy that enters `gemm`."""
        return replace(self, key=replace(self.key, role=f"{operand}.{gemm}"))

    def bits16(
        self, rows: range, cols: range, num_cols: int, device: torch.device | None = None
    ) -> Tensor:
        """Draw for the elements at `rows` x `cols` of a local [*, num_cols] tensor.

        Args:
            rows: local rows, step 1.
            cols: local columns, step 1.
            num_cols: columns of the whole local tensor.
            device: where to draw; the numbers are the same everywhere.

        Returns:
            [len(rows), len(cols)], int16.

        Raises:
            ValueError: if `num_cols` does not fit the layout.
        """
        places = self.layout.column_map(num_cols)
        first = torch.arange(rows.start, rows.stop, device=device).add_(places.row_start)
        base = first.mul_(places.global_cols).unsqueeze(1)  # [rows, 1]
        if places.aligned and cols.start % LANES == 0 and len(cols) % LANES == 0:
            local = torch.arange(cols.start, cols.stop, LANES, device=device)
            counters = (base + places.columns(local)) >> 3
            return random_bits16(counters, self.key.word).view(len(rows), len(cols))
        index = base + places.columns(torch.arange(cols.start, cols.stop, device=device))
        lanes = random_bits16(index >> 3, self.key.word)
        return lanes.gather(-1, (index & (LANES - 1)).unsqueeze(-1)).squeeze(-1)
