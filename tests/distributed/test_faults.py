"""Whatever fails in a refresh, on whichever rank: one decision, no hang, training as if it had not
been."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.workers.fault_places import A_PHASE_EACH, PHASES, PLACES, REFRESHED

WORKERS = "tests.distributed.workers.faults"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "dp": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
EXPERTS = {
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "use_distributed_optimizer": True,
}
TP2 = {"tensor_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True, "global_batch_size": 4}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {**TP2, "pipeline_model_parallel_size": 2},
    "tp2 dp2": {**TP2, **SHARDED},
    "dp4": SHARDED,
}
OF_EXPERTS = ("prepare", "pass B", "apply")
"""Who sends tokens to whom is found out while measuring is prepared."""
SLACK_S = 30.0
"""On top of what ranks wait for each other: for the work itself, on any machine."""
REASONS = {
    "due": "measuring failed on rank ",
    "prepare": "preparing to measure failed on rank 1: RuntimeError: a bug",
    "moments": "reading the optimizer's state failed on rank 1: RuntimeError: a bug",
    "moments memory": "reading the optimizer's state failed on rank 1: OutOfMemoryError",
    "pass A": "pass A (statistics) failed on rank 1: ",
    "pass A memory": "OutOfMemoryError: tried to allocate",
    "perturb": "perturbing the weights failed on rank 1: RuntimeError: a bug",
    "pass B": "pass B (probe) failed on rank 1: ",
    "pass B memory": "OutOfMemoryError: tried to allocate",
    "collect": "collecting sums failed on rank 1: RuntimeError: a bug",
    "reduce": "rank 1: RuntimeError: a bug",
    "late": "measuring failed on rank 0: ",
    "divergences": "measuring failed on rank 1: RuntimeError: a bug",
    "NaN in pass A": "no new plan from the statistics of step ",
    "NaN in pass B": "no new plan from the statistics of step ",
    "NaN": "no new plan from the statistics of step ",
    "submit": "RuntimeError: a bug",
    "solve": "RuntimeError: a bug",
    "broadcast": "reading the new plan failed on rank 1: RuntimeError: a bug",
    "apply": "applying the plan failed on rank 1: RuntimeError: a bug",
    "model": "pass A (statistics) failed on rank 1: RuntimeError: a bug",
    "model memory": "pass A (statistics) failed on rank 1: OutOfMemoryError",
}


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = {
        "layouts": {**LAYOUTS, "ep": EXPERTS},
        "folder": str(tmp_path_factory.mktemp("two")),
        "only": {"ep": OF_EXPERTS},
    }
    return run_ranks(2, f"{WORKERS}:every_phase", arguments, timeout_s=280)


@pytest.mark.parametrize("name", [*LAYOUTS, "ep"])
def test_training_is_bitwise_as_if_no_refresh_had_been_tried(
    phases: list[dict[str, Any]], name: str
) -> None:
    for result in (r[name] for r in phases):
        assert result["run"].pop("kept")
        assert result["run"] == result["plain"]
        assert len(result["run"]["losses"]) == result["steps"]


@pytest.mark.parametrize("name", [*LAYOUTS, "ep"])
def test_every_fault_is_told_once_by_one_rank(phases: list[dict[str, Any]], name: str) -> None:
    leader, other = (r[name]["outcomes"] for r in phases)
    assert set(leader) >= (set(OF_EXPERTS) if name == "ep" else set(PLACES))
    for label, outcome in leader.items():
        fault = "apply" if label.startswith("after ") else label
        *tries, last = outcome["warnings"]
        if fault.startswith("NaN"):
            assert tries and all(" is forbidden for " in text for text in tries), tries
            tries = []
        assert last.startswith("the plan of step 0 stays: "), label
        assert REASONS[fault] in last, (label, last)
        assert len(tries) == (1 if fault.endswith("memory") else 0), (label, tries)
        assert all("ran out of memory" in text for text in tries)
        assert outcome["events"] == other[label]["events"] == ["kept"], label
        assert other[label]["warnings"] == [], label
        assert outcome["history"] == other[label]["history"] == [], label
        # A refresh that failed on its own has no successor's result mixed into it.
        wanted = 1 if fault in REFRESHED else 0
        assert outcome["measured"] == other[label]["measured"] == wanted, label
        bound = phases[0][name]["patience"] * (2 if fault.endswith("memory") else 1) + SLACK_S
        assert max(outcome["seconds"], other[label]["seconds"]) < bound, label


@pytest.mark.parametrize("name", [*LAYOUTS, "ep"])
def test_the_next_refresh_succeeds(phases: list[dict[str, Any]], name: str) -> None:
    leader, other = (r[name]["healed"] for r in phases)
    assert leader == other
    steps = phases[0][name]["steps"]
    assert leader["history"] == [[steps + 1, leader["digest"]]]
    assert leader["refreshed"] == steps  # its first try ran out of memory, its second did not
    assert (leader["heard"], leader["signalled"]) == ("SIGTERM", sorted(PHASES))


@pytest.mark.parametrize("name", [*LAYOUTS, "ep"])
def test_a_full_disk_costs_files_and_nothing_else(phases: list[dict[str, Any]], name: str) -> None:
    leader, other = (r[name]["saved"] for r in phases)
    steps = phases[0][name]["steps"]
    for result in (leader, other):
        assert result["failed"] == (
            "finishing the checkpoint failed on rank 0: OSError: [Errno 28] No space left on device"
        )
        assert result["same"]
        assert (result["read before"], result["read after"]) == (None, steps + 6)
        assert result["plans"] == []
        # The cycle without files, and the one after the checkpoint that was not written.
        assert [step for step, _ in result["last history"]] == [steps + 1, steps + 3, steps + 5]
    assert leader["last history"] == other["last history"]
    assert leader["warnings"] == ["reporting failed: OSError: [Errno 28] No space left on device"]
    assert other["warnings"] == []


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("four"))
    only = dict.fromkeys(FOUR_RANKS, A_PHASE_EACH)
    arguments = {"layouts": FOUR_RANKS, "folder": folder, "only": only}
    return run_ranks(4, f"{WORKERS}:every_phase", arguments, timeout_s=280)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_come_to_one_decision_as_well(
    four_ranks: list[dict[str, Any]], name: str
) -> None:
    first, *others = (r[name] for r in four_ranks)
    for result in (first, *others):
        assert result["run"].pop("kept")
        assert result["run"] == result["plain"]
        assert set(result["outcomes"]) == set(A_PHASE_EACH)
        for label, outcome in result["outcomes"].items():
            assert outcome["events"] == ["kept"], label
            assert outcome["history"] == [], label
            assert outcome["seconds"] < result["patience"] + SLACK_S, label
        assert [step for step, _ in result["healed"]["history"]] == [result["steps"] + 1]
        assert result["healed"] == first["healed"]
        assert result["saved"]["last history"] == first["saved"]["last history"]
        assert result["saved"]["failed"] == first["saved"]["failed"]
        assert result["saved"]["read after"] == result["steps"] + 6
