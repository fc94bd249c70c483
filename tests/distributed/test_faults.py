"""Whatever fails in a refresh, on whichever rank: one decision, no hang, training as if it had not
been."""

import pytest

from tests.distributed.faulty_runs import (
    EVERY_PHASE,
    LAYOUTS,
    PLACES,
    check_full_disk,
    check_log,
    check_next_refresh,
    check_training,
)
from tests.distributed.layouts import EP2, SHARDED, OnRanks, names, results_on

TWO_RANKS = {**LAYOUTS, "ep": {"num_experts": 4, **EP2, **SHARDED}}

phases = results_on(2, EVERY_PHASE, TWO_RANKS, folder=True)
of_every_layout = pytest.mark.parametrize("name", names(TWO_RANKS, ["tp"]))


@of_every_layout
def test_training_is_bitwise_as_if_no_refresh_had_been_tried(phases: OnRanks, name: str) -> None:
    check_training(phases, name)


@of_every_layout
@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_is_logged_once_by_one_rank(phases: OnRanks, name: str, fault: str) -> None:
    check_log(phases, name, fault)


@of_every_layout
def test_the_next_refresh_succeeds(phases: OnRanks, name: str) -> None:
    check_next_refresh(phases, name)


@of_every_layout
def test_a_full_disk_costs_files_and_nothing_else(phases: OnRanks, name: str) -> None:
    check_full_disk(phases, name)
