"""The launcher that the other distributed tests stand on."""

from __future__ import annotations

import pytest

from tests.distributed.launch import RankFailure, run_ranks

WORKERS = "tests.distributed.workers.launching"


def test_every_rank_returns_its_own_value() -> None:
    results = run_ranks(3, f"{WORKERS}:add", {"value": 10.0})
    assert results == [{"rank": r, "sum": 33.0, "world": 3} for r in range(3)]


def test_a_failing_rank_is_named_with_its_traceback_and_ends_the_others() -> None:
    with pytest.raises(RankFailure, match="rank 1 ended with exit code 1") as caught:
        run_ranks(2, f"{WORKERS}:fail_on", {"rank": 1})
    assert "ValueError: the reason why" in str(caught.value)


def test_a_rank_that_hangs_is_ended_and_shows_where_it_was() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, f"{WORKERS}:sleep_on", {"rank": 0}, timeout_s=5)
    assert "in sleep_on" in str(caught.value)
