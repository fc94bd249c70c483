"""Microbatches that a measuring pass may take from the data iterator and give back.

Megatron gives an iterator only to the ranks that read data (None elsewhere) and one for each
model chunk under interleaved pipelines. The first pass records what it takes; later passes and
the training step replay it and then go on with the iterator itself, so the data's order is as if
nothing had been measured. Each reader gets its own (shallow) copy, because Megatron's scripts put
what they move to the device back into the microbatch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

DataIterator = Iterator[Any] | list[Any] | None
"""What Megatron's schedules take: an iterator, one for each model chunk, or None."""


class Replay(Iterator[Any]):
    """An iterator over `source` that can be rewound to where it started."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._taken: list[Any] = []
        self._next = 0

    def __next__(self) -> Any:
        """Return the next microbatch, recorded or fresh."""
        if self._next == len(self._taken):
            self._taken.append(next(self._source))
        item = self._taken[self._next]
        self._next += 1
        return copy.copy(item)

    def rewind(self) -> None:
        """Start again from the first microbatch taken."""
        self._next = 0


class ReplayData:
    """The `Replay`s of all model chunks of a rank."""

    def __init__(self, data_iterator: DataIterator) -> None:
        self._list = isinstance(data_iterator, list)
        sources = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        self._replays = [None if source is None else Replay(source) for source in sources]

    def from_start(self) -> DataIterator:
        """Return what to pass to a schedule, rewound to the first microbatch taken."""
        for replay in self._replays:
            if replay is not None:
                replay.rewind()
        return list(self._replays) if self._list else self._replays[0]
