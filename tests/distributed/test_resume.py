"""A resumed run follows the settings that it is given, from its first iteration on."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_snip.config import make_config
from megatron_snip.errors import SnipError
from megatron_snip.patches.attach import attach
from megatron_snip.patches.registry import CORE, Session
from megatron_snip.planning.plan import PrecisionPlan, write_plan
from megatron_snip.run.loss_monitor import WATCHED_ITERATIONS
from megatron_snip.run.state import RunState
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import TP2
from tests.distributed.small_model import NARROW, SolverHere, layout
from tests.unit.planning.build import plan_of

MODEL = {**NARROW, **TP2}
SNIP: dict[str, Any] = {"interval": 6, "start_step": 2, "lag": 2, "efficiency_target": 0.5}
"""Refreshes at iterations 2 and 8; their plans are due before iterations 4 and 10."""
STOPPED_AT = 5
"""With the plan of the first refresh applied."""
IN_FLIGHT = 3
"""With the problem of the first refresh being solved."""


def resume(
    changes: dict[str, Any],
    stop: int = STOPPED_AT,
    damage: dict[str, Any] | None = None,
    former: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """On ranks: train, stop after iteration `stop`, resume with `changes`, train two iterations."""
    solver = SolverHere()
    with layout({**MODEL, "train_iters": 20}) as trainer:
        controller = trainer.controller({**SNIP, **(former or {})}, solver)
        trainer.advance(stop, controller)
        saved = json.loads(json.dumps(controller.state(stop).to_dict()))
        before = controller.plan
        controller.close()
        del trainer.warnings[:]
        for name, value in (damage or {}).items():
            saved[name] |= value
        state = RunState.from_dict(saved)
        try:
            controller = trainer.controller({**SNIP, **(former or {}), **changes}, solver, state)
        except SnipError as error:
            return {"error": str(error)}
        at_start = controller.plan
        guard = controller.state(stop).guard
        watch = None if guard is None else guard.loss.watch
        fallback = None if guard is None else guard.first_fallback
        trainer.advance(2, controller)
        controller.close()
        return {
            "before": options(before),
            "at start": options(at_start),
            "watched": None if watch is None else watch.left,
            "fallback": None if fallback is None else options(fallback),
            "first iteration": options(plan_of_iteration(trainer, at_start, stop + 1)),
            "fractions": [v["lowest_precision_fraction"] for _, v in trainer.events.metrics],
            "shares": [applied.format_shares for _, applied in trainer.events.applied],
            "plans": [[i, a.plan.iteration, a.resumed] for i, a in trainer.events.applied],
            "history": controller.history,
            "warnings": trainer.warnings,
            "notices": [(i, n.message) for i, n in trainer.events.notices],
        }


def attach_to_damaged() -> str:
    """On ranks: attach where the last rank has read a damaged state; return the error."""
    is_damaged = dist.get_rank() == dist.get_world_size() - 1
    session = Session(loaded_state={"version": 99} if is_damaged else None)
    args = Namespace(iteration=0, seed=1, micro_batch_size=1, seq_length=32)
    with layout({**MODEL, "train_iters": 20}) as trainer:
        model, optimizer = trainer.state.model, trainer.state.optimizer
        try:
            attach(session, make_config(SNIP), args, model, optimizer, dict, [CORE])
        except SnipError as error:
            return str(error)
    return ""


def plan_of_iteration(trainer: Any, plan: PrecisionPlan, iteration: int) -> PrecisionPlan:
    for at, applied in trainer.events.applied:
        plan = applied.plan if at <= iteration else plan
    return plan


def options(plan: PrecisionPlan) -> list[str]:
    return [str(option) for option in plan.linears.values()]


def start(snip: dict[str, Any], file: str) -> str:
    """On ranks: start with the plan file of an all-FP4 plan; return the error, or ''."""
    with layout({**MODEL, "train_iters": 20}) as trainer:
        controller = trainer.controller({"policy": "uniform-fp4"})
        controller.close()
        if dist.get_rank() == 0:
            write_plan(controller.plan, Path(file))
        dist.barrier()
        try:
            trainer.controller({**SNIP, **snip, "plan_file": Path(file)}, SolverHere()).close()
        except SnipError as error:
            return str(error)
    return ""


def start_by_default(formats: str) -> list[float]:
    """On ranks: start without a target; return the run's, and what writers get of it later."""
    with layout({**MODEL, "train_iters": 20}) as trainer:
        controller = trainer.controller({"formats": formats}, SolverHere())
        controller.close()
        later = [settings.values["efficiency_target"] for _, settings in trainer.events.settings]
        return [controller.config.efficiency_target, *later]


def turn_on() -> list[int]:
    """On ranks: train without SNIP, then with it; return where its first plan was reported."""
    with layout({**MODEL, "train_iters": 20}) as trainer:
        trainer.advance(STOPPED_AT)
        trainer.controller({"policy": "uniform-fp4"}, num_done=STOPPED_AT).close()
        return [iteration for iteration, _ in trainer.events.applied]


def on_ranks(name: str, **arguments: Any) -> Any:
    """What rank 0 returned; all ranks returned the same."""
    first, second = run_ranks(2, f"tests.distributed.test_resume:{name}", arguments)
    log_of_rank_0 = first.pop("warnings", []) if isinstance(first, dict) else []
    if isinstance(second, dict):
        second.pop("warnings", None)
    assert first == second
    return {**first, "warnings": log_of_rank_0} if isinstance(first, dict) else first


def test_a_state_that_one_rank_finds_damaged_is_every_ranks_error() -> None:
    """Some formats of checkpoints have a file for each rank."""
    error = on_ranks("attach_to_damaged")
    assert "rank 1" in error and "version 99" in error


def test_a_run_that_turns_snip_on_reports_its_first_plan_where_it_is() -> None:
    assert on_ranks("turn_on") == [STOPPED_AT + 1]


def test_new_formats_hold_from_the_first_iteration() -> None:
    run = on_ranks("resume", changes={"formats": "bf16,fp8"})
    lowered = run["before"].count("fp4")
    assert lowered > 0
    assert set(run["at start"]) == {"fp8"}
    # The target of a half now counts FP8, so the policy may raise half of the linears to BF16.
    assert set(run["first iteration"]) == {"bf16", "fp8"}
    assert 0.5 <= run["fractions"][0] < 1.0
    for shares in run["shares"]:
        assert "fp4" not in shares
    (line,) = run["warnings"]
    assert "formats fp8,fp4 -> bf16,fp8" in line
    assert f"{lowered} of 8 linears raised to fp8: --snip-formats" in line


def test_new_pins_and_a_new_target_hold_from_the_first_iteration() -> None:
    changes = {"pins": "*=bf16", "efficiency_target": 0.0, "formats": "bf16,fp8,fp4"}
    run = on_ranks("resume", changes=changes)
    assert set(run["at start"]) == set(run["first iteration"]) == {"bf16"}
    assert run["fractions"] == [0.0, 0.0]
    (line,) = run["warnings"]
    assert "8 of 8 linears set to bf16: --snip-pins" in line
    assert "efficiency_target 0.5 -> 0.0" in line


def test_a_new_target_is_planned_for_from_the_checkpoints_measurements() -> None:
    before = on_ranks("resume", changes={})
    assert before["warnings"] == before["notices"] == []
    assert before["at start"] == before["first iteration"] == before["before"]
    run = on_ranks("resume", changes={"target_schedule": "0:0.2"})
    assert 0.2 <= run["fractions"][0] < before["fractions"][0]
    assert run["plans"] == [[6, 2, True], [6, 5, False]]
    assert [iteration for iteration, _ in run["history"]] == [4, 6]


@pytest.mark.parametrize(
    ("changes", "share"), [({"formats": "bf16,fp8"}, 0.0), ({"target_schedule": "0:0.2"}, 0.3)]
)
def test_a_plan_in_flight_follows_the_new_settings(changes: dict[str, Any], share: float) -> None:
    run = on_ranks("resume", changes=changes, stop=IN_FLIGHT)
    assert [shares.get("fp4", 0.0) <= share for shares in run["shares"]] == [True]
    assert run["plans"] == [[4, 3, False]]
    unchanged = on_ranks("resume", changes={}, stop=IN_FLIGHT)
    assert unchanged["plans"] == [[4, 2, False]]
    assert unchanged["shares"][0]["fp4"] > 0.4


def test_another_policy_plans_at_once() -> None:
    run = on_ranks("resume", changes={"policy": "uniform-fp8"})
    assert set(run["at start"]) == {"fp8"}
    assert run["plans"] == [[6, 5, False]]  # a file of its own in the run's directory
    run = on_ranks("resume", changes={"policy": "min-abs-err"})
    assert run["plans"][-1][:2] == [6, 5]


def test_new_pins_leave_what_the_guard_may_go_back_to() -> None:
    run = on_ranks("resume", changes={"pins": "*.layers.0.*=fp8"})
    assert run["at start"][:4] == ["fp8"] * 4
    assert run["at start"][4:] == run["before"][4:]
    assert run["watched"] == WATCHED_ITERATIONS
    assert run["fallback"] == ["fp8"] * 4 + ["bf16"] * 4  # the plan before, with the pins


def test_writers_get_the_default_target_that_the_linears_can_reach() -> None:
    assert on_ranks("start_by_default", formats="fp8,fp4") == [0.75]
    assert on_ranks("start_by_default", formats="fp8,fp8-fp4-fp4") == [0.5, 0.5]


def test_collecting_after_a_resume_runs_in_bf16() -> None:
    run = on_ranks("resume", changes={"collect_only": True})
    assert set(run["at start"]) == set(run["first iteration"]) == {"bf16"}
    assert "8 of 8 linears leave the checkpoint's plan and run bf16" in run["warnings"][0]


def test_a_new_plan_file_is_the_plan_and_the_same_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "fp4.json"
    assert on_ranks("start", snip={}, file=str(file)) == ""
    run = on_ranks("resume", changes={"plan_file": str(file)})
    assert set(run["at start"]) == set(run["first iteration"]) == {"fp4"}
    # The guard judges it as it does every plan, and can go back to the checkpoint's.
    assert run["watched"] == WATCHED_ITERATIONS
    assert run["fallback"] == run["before"]
    run = on_ranks("resume", changes={}, former={"plan_file": str(file)})
    assert run["at start"] == run["before"]
    assert run["watched"] == WATCHED_ITERATIONS - 2  # of the stopped run, since iteration 4
    assert "fp8" in run["before"]


@pytest.mark.parametrize(
    ("snip", "wanted"),
    [
        ({"pins": "*.layers.0.*=fp8"}, "the plan breaks --snip-pins .* at 4 of 8 linears"),
        (
            {"pins": "*=bf16", "collect_only": True, "formats": "bf16,fp8,fp4"},
            "the plan breaks --snip-pins .* at 8 of 8 linears",
        ),
        ({"formats": "bf16,fp8"}, r"the plan breaks --snip-formats \(bf16, fp8\) at 8 of 8"),
        ({"policy": "random"}, "'random' plans before the first iteration"),
    ],
)
def test_a_plan_file_that_contradicts_another_setting_is_refused(
    tmp_path: Path, snip: dict[str, Any], wanted: str
) -> None:
    error = on_ranks("start", snip=snip, file=str(tmp_path / "fp4.json"))
    assert error.startswith("plan_file: ")
    assert re.search(wanted, error), error


@pytest.mark.parametrize("due", [10**9, 4])
def test_a_plan_in_flight_is_never_due_later_than_the_lag_allows(due: int) -> None:
    run = on_ranks("resume", changes={}, stop=IN_FLIGHT, damage={"solve": {"apply_at": due}})
    assert run["plans"] == [[4, 2, False]]


def test_a_checkpoint_of_another_model_gives_its_iteration_alone() -> None:
    """A layer more or less: Megatron loads what fits, and SNIP starts anew."""
    run = on_ranks("resume", changes={}, damage={"plan": plan_of(["fp4"] * 3).to_dict()})
    wanted = "are of another model (6 new linears, 1 gone): SNIP starts anew"
    assert [wanted in text for text in run["warnings"]].count(True) == 1, run["warnings"]
    assert set(run["at start"]) == set(run["first iteration"]) == {"bf16"}
    assert run["history"] == []


def test_a_problem_of_another_model_leaves_the_plan() -> None:
    problem = {
        "version": 1,
        "target": 0.5,
        "linears": [
            {
                "name": "other",
                "stage": 0,
                "flops": 1.0,
                "options": {"fp4": {"quality_loss": 1.0, "saving": 1.0}},
            }
        ],
    }
    run = on_ranks("resume", changes={}, stop=IN_FLIGHT, damage={"solve": {"problem": problem}})
    assert run["plans"] == []
    ((iteration, notice),) = run["notices"]
    assert iteration == IN_FLIGHT + 1  # not before the first plan's: W&B refuses earlier steps
    assert "the planning problem in the checkpoint is that of another model" in notice


def test_a_problem_in_flight_loses_options_that_the_formats_do_not_have() -> None:
    """An edited checkpoint: its problem has an option in fp3, which nothing measured."""
    names = [
        f"decoder.layers.{layer}.{module}"
        for layer in range(2)
        for module in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    ]
    options = {
        "fp8": {"quality_loss": 2.0, "saving": 0.0},
        "fp4": {"quality_loss": 1.0, "saving": 1.0},
        "fp3": {"quality_loss": 0.0, "saving": 1.0},
    }
    linears = [{"name": n, "stage": 0, "flops": 1.0, "options": options} for n in names]
    problem = {"version": 1, "target": 0.5, "linears": linears}
    run = on_ranks("resume", changes={}, stop=IN_FLIGHT, damage={"solve": {"problem": problem}})
    assert run["shares"] == [{"fp4": 1.0}]
