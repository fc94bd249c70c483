"""What a checkpoint keeps: plain types, there and back; version 1 is read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_snip.errors import UsageError
from megatron_snip.guard import GuardState, LossMonitor
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.state import ControllerState, Pending
from megatron_snip.statistics.records import StatisticsTable
from tests.unit.planning.build import name_of, problem_of

LINEARS = {"decoder.layers.0.mlp.linear_fc1": Option.parse("fp4-fp8-bf16")}
PLAN = PrecisionPlan(
    iteration=2,
    policy="snip",
    status="feasible",
    objective=None,
    bound=None,
    seconds=0.25,
    target=0.5,
    efficiency=1 / 3,
    stages=(1 / 3,),
    linears=LINEARS,
    digest=assignment_digest(LINEARS),
)
PENDING = Pending(6, 8, problem_of([[0.0, 1.0]]))
GUARD = GuardState(LossMonitor((2.0, 1.9)).after_plan_change(6.0), PLAN, ("0" * 64,), 1, 9)
STATE = ControllerState(
    7, PLAN, ((4, PLAN.digest),), 6, PENDING, GUARD, StatisticsTable(6, 1.5, ())
)


@pytest.mark.parametrize("state", [STATE, ControllerState(0, PLAN, guard=GuardState())])
def test_there_and_back(state: ControllerState) -> None:
    value = state.to_dict()
    assert ControllerState.from_dict(json.loads(json.dumps(value))) == state
    # Megatron reads checkpoints without unpickling objects.
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert ControllerState.from_dict(torch.load(file, weights_only=True)) == state


def test_version_1_counted_iterations_from_0() -> None:
    value = STATE.to_dict()
    old = {k: v for k, v in value.items() if k not in ("iteration", "statistics")}
    old |= {"version": 1, "step": 7, "history": [[3, PLAN.digest]], "refreshed": 5}
    metrics = {name_of(0): {"fp4": {"abs_error": 0.5, "rel_error": float("nan")}}}
    problem = PENDING.problem.to_dict()
    old["pending"] = {"step": 5, "apply_at": 7, "problem": problem, "metrics": metrics}
    old["guard"] = {**value["guard"], "refresh_at": 8}
    old_plan = {k: v for k, v in value["plan"].items() if k != "iteration"}
    old["plan"] = old["guard"]["good"] = old_plan | {"version": 1, "step": PLAN.iteration - 1}
    read = ControllerState.from_dict(old)
    assert read.pending.problem.linears[0].options["fp4"].scores == {
        "abs_error": 0.5,
        "rel_error": None,
    }
    assert replace(read, pending=PENDING).to_dict() == {**value, "statistics": None}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 3}, "version 3; this megatron-snip reads versions 1 and 2"),
        ({"plan": {}}, "here, plan: version None"),
        ({"history": [1]}, "here is damaged"),
        ({"pending": {"iteration": 1}}, "here is damaged .*apply_at"),
        ({"iteration": "seven"}, "here is damaged"),
        ({"guard": {"loss": {}}}, "here is damaged .*good"),
        ({"guard": {**GUARD.to_dict(), "good": {}}}, "here, good plan: version None"),
        ({"guard": {**GUARD.to_dict(), "loss": {"recent": [float("nan")], "watch": None}}}, "nan"),
    ],
)
def test_damage_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ControllerState.from_dict(STATE.to_dict() | change, "here")
    with pytest.raises(UsageError, match="version None"):
        ControllerState.from_dict([1], "here")
