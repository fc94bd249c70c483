"""A run that is killed without notice resumes to the same result, bit by bit."""

from pathlib import Path

import pytest

from tests.nightly.kills import STEPS, disturbed, undisturbed


@pytest.mark.slow
def test_a_killed_run_is_bitwise_the_run_left_alone(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path, ranks=1)
    assert [row["iteration"] for row in whole["rows"]] == list(range(1, STEPS + 1))
    assert len(whole["plans"]) >= 2
    killed = disturbed(tmp_path, seed=3, ranks=1, kills=1)
    at = killed.pop("killed_at")
    assert len(at) == 1 and 0 < at[0] < STEPS, at  # it was killed while it trained
    assert killed == whole
