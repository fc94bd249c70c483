"""Whatever fails in a refresh, on whichever rank: one decision, no hang, training as if it had not
been."""

from typing import Any

import pytest

from tests.distributed.layouts import EP2, OVERLAP, PP2, SHARDED, TP2, names, results_on
from tests.distributed.workers.fault_places import MEASURED, PHASES, PLACES

LAYOUTS: dict[str, dict[str, Any]] = {"tp": TP2, "pp": PP2, "dp": OVERLAP}
TWO_RANKS = {**LAYOUTS, "ep": {"num_experts": 4, **EP2, **SHARDED}}
REASONS = {
    "moments": "reading the optimizer's state failed on rank 1: RuntimeError: a bug",
    "moments memory": "reading the optimizer's state failed on rank 1: OutOfMemoryError",
    "forward": "measuring failed on rank 1: ",
    "backward": "measuring failed on rank 1: ",
    "backward memory": "OutOfMemoryError: tried to allocate",
    "reduce": "measuring failed on rank 1: RuntimeError: a bug",
    "problem": "making a planning problem failed on rank 1: RuntimeError: a bug",
    "NaN": "no plan from the statistics of iteration ",
    "submit": "RuntimeError: a bug",
    "solve": "RuntimeError: a bug",
    "infeasible": "efficiency_target: no plan satisfies: target 0.5",
    "another model": "the plan does not have",
    "damaged": "does not match its linears",
    "broadcast": "reading the plan failed on rank 1: RuntimeError: a bug",
    "apply": "applying the plan failed on rank 1: RuntimeError: a bug",
}


phases = results_on(2, "tests.distributed.workers.faults:every_phase", TWO_RANKS, folder=True)


@pytest.mark.parametrize("name", names(TWO_RANKS, ["tp"]))
def test_training_is_bitwise_as_if_no_refresh_had_been_tried(
    phases: list[dict[str, Any]], name: str
) -> None:
    for result in (r[name] for r in phases):
        assert result["run"].pop("kept")
        assert result["run"] == result["plain"]
        assert len(result["run"]["losses"]) == result["steps"]


@pytest.mark.parametrize("name", names(TWO_RANKS, ["tp"]))
def test_every_fault_is_logged_once_by_one_rank(phases: list[dict[str, Any]], name: str) -> None:
    leader, other = (r[name]["outcomes"] for r in phases)
    assert set(leader) == set(PLACES)
    for fault, outcome in leader.items():
        *others, last = outcome["warnings"]
        assert all(" is forbidden for " in text for text in others), others
        assert bool(others) == (fault == "NaN"), (fault, outcome["warnings"])
        assert ": keeping the uniform-bf16 plan of iteration 0: " in last, fault
        assert REASONS[fault] in last, (fault, last)
        assert outcome["events"] == other[fault]["events"] == ["refresh_failed"], fault
        assert other[fault]["warnings"] == [], fault
        assert outcome["history"] == other[fault]["history"] == [], fault
        # A refresh that failed leaves nothing for its successor.
        wanted = 1 if fault in MEASURED else 0
        assert outcome["measured"] == other[fault]["measured"] == wanted, fault


@pytest.mark.parametrize("name", names(TWO_RANKS, ["tp"]))
def test_the_next_refresh_succeeds(phases: list[dict[str, Any]], name: str) -> None:
    leader, other = (r[name]["healed"] for r in phases)
    assert leader == other
    steps = phases[0][name]["steps"]
    assert leader["history"] == [[steps + 2, leader["digest"]]]
    assert leader["refreshed"] == steps + 1
    assert (leader["stop_signal"], leader["signalled"]) == ("SIGTERM", sorted(PHASES))


@pytest.mark.parametrize("name", names(TWO_RANKS, ["tp"]))
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
        assert [step for step, _ in result["last history"]] == [steps + 2, steps + 4, steps + 6]
    assert leader["last history"] == other["last history"]
    assert leader["warnings"] == [
        "snip: RunDirectory failed: OSError: [Errno 28] No space left on device"
    ]
    assert other["warnings"] == []
