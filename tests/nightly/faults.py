"""Faults in every phase of a refresh on four ranks, and ranks that are killed.

python -m pytest tests/nightly/faults.py
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import test_faults as faults
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import PP2, SHARDED, TP2, results_on

BATCH = {"global_batch_size": 4}
FOUR_RANKS = {
    "tp2 pp2": {**TP2, **PP2, **BATCH},
    "tp2 dp2": {**TP2, **SHARDED, **BATCH},
    "dp4": {**SHARDED, **BATCH},
}
CHECKS = [check for name, check in vars(faults).items() if name.startswith("test_")]
phases = results_on(4, faults.EVERY_PHASE, FOUR_RANKS, folder=True)


@pytest.mark.parametrize("name", FOUR_RANKS)
@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks_make_one_decision(
    phases: list[dict[str, Any]], name: str, check: Callable[..., None]
) -> None:
    check(phases, name)


@pytest.mark.parametrize("name", faults.LAYOUTS)
@pytest.mark.parametrize("phase", faults.PHASES)
def test_a_rank_that_is_killed_ends_the_job(name: str, phase: str) -> None:
    arguments = {"values": faults.LAYOUTS[name], "phase": phase}
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(2, "tests.distributed.test_faults:killed", arguments)
