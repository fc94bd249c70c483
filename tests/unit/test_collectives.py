"""Without a process group everything is what one rank alone would do."""

from unittest.mock import Mock

import pytest

from megatron_snip.collectives import RemoteFailure, attempt, broadcast_json, gather_json, on_rank_0
from megatron_snip.errors import UsageError


def test_values_take_the_way_through_json_even_alone() -> None:
    """Tuples become lists on one rank as on many, so nothing works by chance."""
    assert gather_json({"a": (1, 2)}, None) == [{"a": [1, 2]}]
    assert broadcast_json({"a": (1, 2)}, None) == {"a": [1, 2]}
    with pytest.raises(TypeError):
        gather_json({1, 2}, None)
    with pytest.raises(TypeError):
        broadcast_json(object(), None)


def test_one_rank_fails_as_many_do() -> None:
    assert attempt("trying", lambda: 5, None) == 5
    with pytest.raises(RemoteFailure, match=r"trying failed on rank 0: KeyError: 'reason'$"):
        attempt("trying", Mock(side_effect=KeyError("reason")), None)
    with pytest.raises(KeyboardInterrupt):  # no failure
        attempt("trying", Mock(side_effect=KeyboardInterrupt), None)


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        (["a"], "rank 0: a"),
        ([None, "a", None, "b", "a"], "ranks 1, 4: a; rank 3: b"),
        (["a"] * 512, "ranks 0, 1, 2 and 509 more: a"),
        ([f"{n} bytes" for n in range(512)], None),
        (["a", "b", "c", "a", "d", "d", "e"], "ranks 0, 3: a; rank 1: b; rank 2: c; 3 more"),
    ],
)
def test_a_failure_of_many_ranks_is_a_short_line(
    failures: list[str | None], text: str | None
) -> None:
    text = text or "rank 0: 0 bytes; rank 1: 1 bytes; rank 2: 2 bytes; 509 more"
    found = str(RemoteFailure("trying", failures))
    assert found.removesuffix(", see their logs") == f"trying failed on {text}"


def test_what_rank_0_returns_or_raises_is_what_every_rank_gets() -> None:
    refuse = Mock(side_effect=UsageError("must be even, got 3", "interval"))
    assert on_rank_0("trying", lambda: {"a": (1, 2)}, None) == {"a": [1, 2]}
    with pytest.raises(UsageError, match=r"^interval: must be even, got 3$") as caught:
        on_rank_0("trying", refuse, None)
    assert caught.value.field == "interval"
    for value, reason in (({1}, "TypeError: "), (float("nan"), "ValueError: ")):
        with pytest.raises(RemoteFailure, match=f"^trying failed on rank 0: {reason}"):
            on_rank_0("trying", lambda value=value: value, None)
