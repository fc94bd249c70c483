"""Alone, everything is what one rank would do; messages of many ranks are short."""

from collections.abc import Mapping, Sequence
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_snip import rank_tree
from megatron_snip.collectives import Control, RemoteFailure
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.rank_tree import RankTree, Records

ALONE = Control()


def test_values_take_the_way_through_json_even_alone() -> None:
    """Tuples become lists on one rank as on many, so nothing works by chance."""
    found = ALONE.gather("trying", lambda: {"a": (1, 2)})
    assert found.values == ({"a": [1, 2]},) and list(found.by_rank()) == [{"a": [1, 2]}]
    assert ALONE.broadcast({"a": (1, 2)}) == {"a": [1, 2]}
    with pytest.raises(RemoteFailure, match="trying failed on rank 0: TypeError"):
        ALONE.gather("trying", lambda: {1, 2})
    with pytest.raises(TypeError):
        ALONE.broadcast(object())


def test_numbers_of_one_rank_stay_as_they_are() -> None:
    sums, maxima = torch.tensor([1.5, -2.0]), torch.tensor([3.0])
    assert ALONE.sum_(sums, maxima) is sums
    assert (sums.tolist(), maxima.tolist()) == ([1.5, -2.0], [3.0])
    assert ALONE.any(True) and not ALONE.any(False)
    assert ALONE.traffic.exchanges == 0


def test_one_rank_fails_as_many_do() -> None:
    assert ALONE.attempt("trying", lambda: 5) == 5
    with pytest.raises(RemoteFailure, match=r"trying failed on rank 0: KeyError: 'reason'$"):
        ALONE.attempt("trying", Mock(side_effect=KeyError("reason")))
    with pytest.raises(KeyboardInterrupt):  # no failure
        ALONE.attempt("trying", Mock(side_effect=KeyboardInterrupt))


def test_a_refusal_is_a_failure_only_where_none_is_expected() -> None:
    refuse = Mock(side_effect=UnsupportedError("one", "two"))
    with pytest.raises(UnsupportedError) as caught:
        ALONE.gather("trying", refuse)
    assert caught.value.messages == ("one", "two")
    with pytest.raises(UsageError, match=r"^pins: bad$"):
        ALONE.gather("trying", Mock(side_effect=UsageError("bad", "pins")))
    for failing in (ALONE.attempt, partial(ALONE.gather, may_refuse=False)):
        with pytest.raises(RemoteFailure, match="UnsupportedError: one two"):
            failing("trying", refuse)


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ({"a": [range(1)]}, "rank 0: a"),
        ({"a": [range(1, 2), range(4, 5)], "b": [range(3, 4)]}, "ranks 1, 4: a; rank 3: b"),
        ({"a": [range(512)]}, "ranks 0-511: a"),
        ({"a": [range(i, i + 1) for i in range(0, 9, 2)]}, "ranks 0, 2, 4 and 2 more: a"),
        (
            {f"{n} bytes": [range(n, n + 1)] for n in range(512)},
            "rank 0: 0 bytes; rank 1: 1 bytes; rank 2: 2 bytes; 509 more, see their logs",
        ),
    ],
)
def test_a_failure_of_many_ranks_is_a_short_line(
    failures: Mapping[str, Sequence[range]], text: str
) -> None:
    assert str(RemoteFailure("trying", failures)) == f"trying failed on {text}"


def test_what_rank_0_returns_or_raises_is_what_every_rank_gets() -> None:
    refuse = Mock(side_effect=UsageError("must be even, got 3", "interval"))
    assert ALONE.on_rank_0("trying", lambda: {"a": (1, 2)}) == {"a": [1, 2]}
    with pytest.raises(UsageError, match=r"^interval: must be even, got 3$") as caught:
        ALONE.on_rank_0("trying", refuse)
    assert caught.value.field == "interval"
    for value, reason in (({1}, "TypeError: "), (float("nan"), "ValueError: ")):
        with pytest.raises(RemoteFailure, match=f"^trying failed on rank 0: {reason}"):
            ALONE.on_rank_0("trying", lambda value=value: value)


def test_16384_ranks_with_16_records_are_16_records() -> None:
    """Each of 16 pipeline stages has one record: what rank 0 holds in the end."""
    records = Records({})
    for rank in range(16384):
        records.add(Records({b"%d" % (rank // 1024) * 1000: [range(rank, rank + 1)]}))
    assert [len(ranges) for ranges in records.ranges.values()] == [1] * 16
    assert len(records.encoded()) < 40_000
    assert Records.decoded(records.encoded()) == records


@pytest.mark.parametrize(
    ("notes", "lost"),
    [
        ({5: 3}, 5),  # they wait for each other
        ({5: 6, 6: 5}, 5),  # others do
        ({5: 6, 6: 7}, 7),
        ({}, 5),
    ],
    ids=["circle of two", "circle of others", "chain", "no note"],
)
def test_a_rank_that_gives_up_never_names_itself(
    notes: Mapping[int, int], lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    for rank, waits_for in notes.items():
        store.set(f"snip/lost/all/{rank}", str(waits_for))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(rank_tree, "_NOTE_S", 0.0)
    tree = RankTree(None)
    tree.rank = 3
    tree.group = Mock(group_name="all")
    assert tree._lost(5, waited_s=1.0) == lost
    assert store.get("snip/lost/all/3") == b"5"
