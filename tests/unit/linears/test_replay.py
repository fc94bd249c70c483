"""Microbatches that a pass takes and gives back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from megatron_snip.linears.replay import Replay, ReplayData


def counting(taken: list[int]) -> Iterator[dict[str, int]]:
    for number in range(6):
        taken.append(number)
        yield {"number": number}


def take(data: object, count: int) -> list[int]:
    assert isinstance(data, Iterator)
    return [next(data)["number"] for _ in range(count)]


def test_the_data_s_order_is_as_if_nothing_had_been_measured() -> None:
    taken: list[int] = []
    source = counting(taken)
    data = ReplayData(source)
    assert take(data.from_start(), 2) == [0, 1]  # pass A
    assert take(data.from_start(), 2) == [0, 1]  # pass B
    assert taken == [0, 1]
    assert take(data.from_start(), 4) == [0, 1, 2, 3]  # training
    assert taken == [0, 1, 2, 3]
    assert next(source) == {"number": 4}  # the next step


def test_nothing_is_read_ahead() -> None:
    taken: list[int] = []
    ReplayData(counting(taken)).from_start()
    assert taken == []


def test_a_reader_that_changes_its_microbatch_does_not_change_the_next_s() -> None:
    """Megatron's scripts put what they move to the device back into the dict."""
    replay = Replay(counting([]))
    first = next(replay)
    first["number"] = 99
    first["more"] = 1
    replay.rewind()
    assert next(replay) == {"number": 0}


def test_the_end_of_the_data_is_passed_on() -> None:
    replay = Replay(iter([1]))
    assert next(replay) == 1
    with pytest.raises(StopIteration):
        next(replay)
    replay.rewind()
    assert next(replay) == 1


def test_ranks_without_data_and_several_chunks() -> None:
    assert ReplayData(None).from_start() is None
    data = ReplayData([counting([]), None, counting([])])
    first = data.from_start()
    assert isinstance(first, list)
    assert first[1] is None
    assert take(first[0], 3) == [0, 1, 2]
    assert take(first[2], 1) == [0]
    again = data.from_start()
    assert isinstance(again, list)
    assert take(again[0], 1) + take(again[2], 2) == [0, 0, 1]
