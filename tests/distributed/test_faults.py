"""Whatever fails in a refresh, on whichever rank: one decision, no hang, training as if it had not
been; and plans that break the loss go."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.workers.faults import A_PHASE_EACH, REFRESHED, START

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
TP2 = {"tensor_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True, "global_batch_size": 4}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {**TP2, "pipeline_model_parallel_size": 2},
    "tp2 dp2": {**TP2, **SHARDED},
    "dp4": SHARDED,
}
REASONS = {
    "prepare": "preparing to measure failed on rank 1: RuntimeError: a bug",
    "moments": "reading the optimizer's state failed on rank 1: RuntimeError: a bug",
    "moments memory": "reading the optimizer's state failed on rank 1: OutOfMemoryError",
    "pass A": "pass A (statistics) failed on rank 1: ",
    "pass A memory": "OutOfMemoryError: tried to allocate",
    "perturb": "perturbing the weights failed on rank 1: RuntimeError: a bug",
    "pass B": "pass B (probe) failed on rank 1: ",
    "reduce": "rank 1: RuntimeError: a bug",
    "late": "measuring failed on rank 0: ",
    "divergences": "measuring failed on rank 1: RuntimeError: a bug",
    "NaN": "no new plan from the statistics of step ",
    "solve": "RuntimeError: a bug",
    "broadcast": "reading the new plan failed on rank 1: RuntimeError: a bug",
    "apply": "applying the plan failed on rank 1: RuntimeError: a bug",
    "model": "pass A (statistics) failed on rank 1: RuntimeError: a bug",
    "model memory": "pass A (statistics) failed on rank 1: OutOfMemoryError",
}


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = {"layouts": LAYOUTS, "folder": str(tmp_path_factory.mktemp("two"))}
    return run_ranks(2, f"{WORKERS}:every_phase", arguments, timeout_s=280)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_bitwise_as_if_no_refresh_had_been_tried(
    phases: list[dict[str, Any]], name: str
) -> None:
    for result in (r[name] for r in phases):
        assert result["run"].pop("kept")
        assert result["run"] == result["plain"]
        assert len(result["run"]["losses"]) == result["steps"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_fault_is_told_once_by_one_rank(phases: list[dict[str, Any]], name: str) -> None:
    leader, other = (r[name]["outcomes"] for r in phases)
    assert set(leader) >= set(REASONS) - {"model", "model memory"}
    for label, outcome in leader.items():
        fault = "apply" if label.startswith("after ") else label
        *tries, last = outcome["warnings"]
        if fault == "NaN":
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_next_refresh_succeeds(phases: list[dict[str, Any]], name: str) -> None:
    leader, other = (r[name]["healed"] for r in phases)
    assert leader == other
    steps = phases[0][name]["steps"]
    assert leader["history"] == [[steps + 1, leader["digest"]]]
    assert leader["refreshed"] == steps  # its first try ran out of memory, its second did not


@pytest.mark.parametrize("name", LAYOUTS)
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
    arguments = {"layouts": FOUR_RANKS, "folder": folder, "only": A_PHASE_EACH}
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
        assert [step for step, _ in result["healed"]["history"]] == [result["steps"] + 1]
        assert result["healed"] == first["healed"]
        assert result["saved"]["last history"] == first["saved"]["last history"]
        assert result["saved"]["failed"] == first["saved"]["failed"]
        assert result["saved"]["read after"] == result["steps"] + 6


@pytest.fixture(scope="module")
def bad_plans() -> list[dict[str, Any]]:
    layouts = {"tp": LAYOUTS["tp"], "dp": LAYOUTS["dp"]}
    return run_ranks(2, f"{WORKERS}:bad_plans", {"layouts": layouts}, timeout_s=200)


@pytest.mark.parametrize("name", ["tp", "dp"])
@pytest.mark.parametrize("how", ["gradient", "loss", "useless"])
def test_a_plan_that_breaks_a_step_leaves_no_trace(
    bad_plans: list[dict[str, Any]], name: str, how: str
) -> None:
    for rank, runs in enumerate(r[name] for r in bad_plans):
        run, plain = runs[how], runs["plain"]
        assert {key: run[key] for key in plain} == plain
        # Applied before this step, taken back within it; the digest is that of BF16 throughout.
        step = START + 1
        assert [at for at, _ in run["history"]] == [step, step]
        assert run["history"][1][1] == run["digest"] != run["history"][0][1]
        assert run["bf16"] == ["bf16"]
        assert run["events"] == [[step, "guard"], [step, "fallback"]]
        assert run["planned"] == [[step, START, 8], [step, step, 8]]
        assert len(run["warnings"]) == (2 if rank == 0 else 0)


@pytest.fixture(scope="module")
def again() -> list[dict[str, Any]]:
    return run_ranks(2, f"{WORKERS}:asked_again", {"values": LAYOUTS["pp"]}, timeout_s=120)


def test_the_step_after_measures_anew_and_a_refused_plan_is_not_taken_twice(
    again: list[dict[str, Any]],
) -> None:
    for result in again:
        assert result["refreshes"] == [START, START + 2]
        kinds = ("guard", "fallback", "kept")
        steps = (START + 1, START + 1, START + 3)
        assert result["events"] == [[s, k] for s, k in zip(steps, kinds, strict=True)]
        assert "took back the very plan" in result["messages"][2]
        assert result["state"]["falls"] == 1
        assert len(result["state"]["refused"]) == 1
    assert again[0]["history"] == again[1]["history"]


def test_a_plan_that_spoils_the_weights_goes_and_training_recovers() -> None:
    arguments = {"values": {"train_iters": 110}, "steps": 110}
    for result in run_ranks(1, f"{WORKERS}:poisoned", arguments, timeout_s=280):
        kinds = [kind for _, kind, _ in result["events"]]
        assert kinds.count("fallback") == 1
        fell = next(step for step, kind, _ in result["events"] if kind == "fallback")
        before = sum(result["losses"][START - 4 : START + 1]) / 5
        assert max(result["losses"][START + 1 : fell]) > 1.2 * before  # it did harm
        recovered, plain = (sum(curve[-10:]) / 10 for curve in (result["losses"], result["plain"]))
        assert recovered <= 1.02 * plain
