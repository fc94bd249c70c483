"""The cycle on two ranks: it closes, replays, resumes, and refuses what cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.planning.plan import read_plan
from megatron_snip.planning.problem import read_problem
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import TP2

WORKERS = "tests.distributed.workers.controller"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cycles")


@pytest.fixture(scope="module")
def cycles(folder: Path) -> list[dict[str, Any]]:
    arguments = {"layout_values": TP2, "folder": str(folder)}
    return run_ranks(2, f"{WORKERS}:cycles", arguments)


def test_plans_are_applied_lag_steps_after_they_were_measured(cycles: list[dict[str, Any]]) -> None:
    for result in (r["uninterrupted"] for r in cycles):
        assert [iteration for iteration, _ in result["history"]] == [3, 7]
        assert result["history"][-1][1] == result["digest"]
        assert result["installed"] == [True, False]
        assert result["warnings"] == []
    assert cycles[0]["uninterrupted"]["history"] == cycles[1]["uninterrupted"]["history"]


@pytest.mark.parametrize("run", ["again", "resumed"])
def test_a_run_replays_and_resumes_bit_by_bit(cycles: list[dict[str, Any]], run: str) -> None:
    """It resumes with its problem in flight, and again under its plan."""
    for result in cycles:
        for key in ("losses", "weights", "optimizer", "history", "digest"):
            assert result[run][key] == result["uninterrupted"][key]


def test_a_resumed_run_reports_its_plan_at_once(cycles: list[dict[str, Any]]) -> None:
    for result in cycles:
        applied = [[], [[3, 2, False]], [[5, 2, True], [7, 6, False]]]
        assert result["resumed"]["applied"] == applied
        assert result["resumed"]["alerts"] == [[2], [], []]  # each linear is named once


def test_collecting_makes_no_plan(cycles: list[dict[str, Any]]) -> None:
    for watched in (result["collect only"] for result in cycles):
        assert watched["refreshes"] == [2, 6]
        assert watched["history"] == []
        assert set(watched["fractions"]) == {0.0}
        ((at, kind, text),) = watched["notices"]  # every linear at the first refresh, then none
        assert (at, kind) == (2, "health")
        assert "alert underflow>0.01: decoder.layers." in text and " fp4 0." in text


def test_the_run_directory_holds_what_was_decided(
    cycles: list[dict[str, Any]], folder: Path
) -> None:
    run = folder / "uninterrupted"
    kinds = ("divergences", "health", "plans", "problems")
    for kind in kinds:
        assert sorted(p.name for p in (run / kind).iterdir()) == ["2.json", "6.json"]
    digests = [digest for _, digest in cycles[0]["uninterrupted"]["history"]]
    for step, digest in zip((2, 6), digests, strict=True):
        plan = read_plan(run / "plans" / f"{step}.json")
        problem = read_problem(run / "problems" / f"{step}.json")
        assert (plan.iteration, plan.digest) == (step, digest)
        assert plan.policy == "snip"
        assert plan.efficiency >= plan.target == problem.target == 0.5
        assert list(plan.linears) == list(problem.names)
        divergences = json.loads((run / "divergences" / f"{step}.json").read_text())
        assert [row["name"] for row in divergences["linears"]] == list(problem.names)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [m["iteration"] for m in metrics] == list(range(1, 10))
    wanted = {"iteration", "loss", "tokens_per_s", "lowest_precision_fraction"}
    assert all(wanted <= set(m) for m in metrics)


def test_targets_follow_a_schedule_without_measuring_and_resume() -> None:
    first, second = run_ranks(2, f"{WORKERS}:schedules", {"layout_values": TP2})
    for name, measured in (("healed", [2]), ("static", [])):
        straight, resumed = first[name]
        assert straight == resumed and second[name][0] == second[name][1]
        assert straight["plans"] == second[name][0]["plans"]
        assert (straight["measured"], straight["warnings"]) == (measured, [])
        for _, target, efficiency, _ in straight["plans"]:
            assert target <= efficiency + 1e-9 < target + 1 / 16  # the largest GEMM
    healed = {i: (target, low) for i, target, _, low in first["healed"][0]["plans"]}
    targets = [target for target, _ in healed.values()]
    assert targets == sorted(targets, reverse=True) and len(targets) >= 6
    assert targets[:2] == [0.8, 0.5] and targets[-1] == 0.0
    assert list(healed)[:3] == [3, 5, 9] and max(healed) < 17  # there is time for the last one
    kept = healed[5][1]
    for _, low in list(healed.values())[2:]:
        raised = [item for item in kept if item not in low]
        assert all(item in kept for item in low)
        assert all(gemm == "fprop" for _, gemm in raised) or not any(g == "fprop" for _, g in low)
        kept = low
    static = [(i, target) for i, target, _, _ in first["static"][0]["plans"]]
    assert static == [(1, 0.65), (2, 0.55), (3, 0.45), (4, 0.35), (5, 0.25), (9, 0.5)]


def test_what_cannot_work_is_refused_on_every_rank(tmp_path: Path) -> None:
    arguments = {"layout_values": TP2, "folder": str(tmp_path)}
    first, second = run_ranks(2, f"{WORKERS}:refusals", arguments)
    assert first == second
    wanted = {
        "policy": "unknown policy 'clever'; known: snip",
        "pin": "no linear's name matches",
        "target": "0.1",
        "plan file": "the model does not have decoder.layers.9.mlp.linear_fc1",
        "missing plan file": "cannot read plan file",
    }
    for case, text in wanted.items():
        kind, message = first[case]
        assert kind == "UsageError", (case, kind, message)
        assert text in message, (case, message)
        assert "\n" not in message


def test_a_loop_of_ones_own_trains_as_the_trainers() -> None:
    """The code of docs/extending.md, against the embedded trainer's loop: bit for bit."""
    for result in run_ranks(2, f"{WORKERS}:own_loop"):
        assert result["lines"] < 30
        assert result["shown"] == result["trainer"]
        assert [iteration for iteration, _ in result["shown"]["history"]] == [13, 23]
        assert result["saved"] == [30, result["shown"]["history"]]
