"""Faults in every phase of a refresh on four ranks, and ranks that are killed.

python -m pytest tests/nightly/faults.py
"""

from collections.abc import Callable

import pytest

from tests.distributed import faulty_runs
from tests.distributed.faulty_runs import PHASES, PLACES
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import PP2, SHARDED, TP2, OnRanks, results_on

BATCH = {"global_batch_size": 4}
FOUR_RANKS = {
    "tp2 pp2": {**TP2, **PP2, **BATCH},
    "tp2 dp2": {**TP2, **SHARDED, **BATCH},
    "dp4": {**SHARDED, **BATCH},
}
CHECKS = (
    faulty_runs.check_training,
    faulty_runs.check_next_refresh,
    faulty_runs.check_full_disk,
)
phases = results_on(4, faulty_runs.EVERY_PHASE, FOUR_RANKS, folder=True)


@pytest.mark.parametrize("name", FOUR_RANKS)
@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks_make_one_decision(
    phases: OnRanks, name: str, check: Callable[[OnRanks, str], None]
) -> None:
    check(phases, name)


@pytest.mark.parametrize("name", FOUR_RANKS)
@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_is_logged_once_by_one_rank(phases: OnRanks, name: str, fault: str) -> None:
    faulty_runs.check_log(phases, name, fault)


@pytest.mark.parametrize("name", faulty_runs.LAYOUTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_ends_the_job(name: str, phase: str) -> None:
    arguments = {"values": faulty_runs.LAYOUTS[name], "phase": phase}
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(2, "tests.distributed.faulty_runs:killed", arguments)
