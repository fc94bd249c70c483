"""What a checkpoint keeps: plain types, there and back."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch

from megatron_snip.controller_state import ControllerState, GuardState, Pending
from megatron_snip.errors import UsageError
from megatron_snip.loss_guard import GuardSettings, LossGuard
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest

LINEARS = {"decoder.layers.0.mlp.linear_fc1": Option.parse("fp4-fp8-bf16")}
PLAN = PrecisionPlan(
    step=2,
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
PENDING = Pending(6, 8, {"version": 1, "linears": [], "target": 0.5}, {"a": {"fp4": {"e": 0.1}}})


WATCH = GuardSettings(steps=5, sigmas=6.0, rise=0.2, patience=3)
GUARD = GuardState(LossGuard((2.0, 1.9)).changed(WATCH), PLAN, ("0" * 64,), 1, 9)


@pytest.mark.parametrize("pending", [None, PENDING])
@pytest.mark.parametrize("guard", [None, GUARD, GuardState(LossGuard())])
def test_there_and_back(pending: Pending | None, guard: GuardState | None) -> None:
    state = ControllerState(7, PLAN, ((4, PLAN.digest),), 6, pending, guard)
    value = state.to_dict()
    assert ControllerState.from_dict(json.loads(json.dumps(value))) == state
    # Megatron reads checkpoints without unpickling objects.
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert ControllerState.from_dict(torch.load(file, weights_only=True)) == state


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "version 2; this megatron-snip reads version 1"),
        ({"plan": {}}, "here, plan: version none"),
        ({"history": [1]}, "here is damaged"),
        ({"pending": {"step": 1}}, "here is damaged .*apply_at"),
        ({"step": "seven"}, "here is damaged"),
        ({"guard": {"loss": {}}}, "here is damaged .*good"),
        ({"guard": {**GUARD.to_dict(), "good": {}}}, "here, good plan: version none"),
    ],
)
def test_damage_is_named(change: dict[str, Any], text: str) -> None:
    value = ControllerState(7, PLAN).to_dict() | change
    with pytest.raises(UsageError, match=text):
        ControllerState.from_dict(value, "here")


def test_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="version None"):
        ControllerState.from_dict([1], "here")


def test_a_state_from_before_there_was_a_guard_is_read() -> None:
    value = ControllerState(7, PLAN).to_dict()
    del value["guard"]
    assert ControllerState.from_dict(value) == ControllerState(7, PLAN)
