"""A run that is killed without notice resumes to the same result, bit by bit.

Every process of a run is killed at once, at a random moment, while it trains, measures, solves or
saves (it saves after every second iteration); the same command is given again until the run ends.
The loss of every iteration, every plan and where it was applied are those of an uninterrupted run.
`tests/nightly/kills.py` has more runs.
"""

from pathlib import Path

import pytest

from tests.distributed.killed_runs import STEPS, run_killed, run_uninterrupted


@pytest.mark.slow
def test_a_killed_run_is_bitwise_an_uninterrupted_one(tmp_path: Path) -> None:
    expected = run_uninterrupted(tmp_path, ranks=1)
    assert [row["iteration"] for row in expected["rows"]] == list(range(1, STEPS + 1))
    assert len(expected["plans"]) >= 2
    found = run_killed(tmp_path, seed=3, ranks=1, kills=1)
    at = found.pop("killed_at")
    assert len(at) == 1 and 0 < at[0] < STEPS, at  # it was killed while it trained
    assert found == expected
