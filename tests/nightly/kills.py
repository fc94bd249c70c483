"""kill -9 up to three times at random points of 40 short runs of two ranks.

python -m pytest tests/nightly/kills.py
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.killed_runs import run_killed, run_uninterrupted


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kills")
    return folder, run_uninterrupted(folder, ranks=2)


@pytest.fixture(scope="module")
def kills_of_runs() -> Iterator[list[Any]]:
    """Where each run was killed. A kill comes too late for some runs, not for most."""
    runs: list[Any] = []
    yield runs
    killed = sum(map(bool, runs))
    assert killed >= len(runs) / 2, f"{killed} of {len(runs)} runs were killed: wait less"


@pytest.mark.parametrize("seed", range(40))
def test_a_killed_run_is_bitwise_an_uninterrupted_one(
    uninterrupted: tuple[Path, dict[str, Any]], kills_of_runs: list[Any], seed: int
) -> None:
    folder, expected = uninterrupted
    found = run_killed(folder, seed, ranks=2)
    kills_of_runs.append(found.pop("killed_at"))
    assert found == expected
