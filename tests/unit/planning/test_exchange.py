import json

import pytest

from megatron_snip.errors import InfeasiblePlanError, PlanningError, SnipError, UsageError
from megatron_snip.planning.exchange import (
    PlanRequest,
    decode_reply,
    decode_request,
    encode_error,
    encode_plan,
    encode_request,
)
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import plan_of, problem_of

PROBLEM = problem_of([[0.1, None], [1 / 3, 2e-300]], 0.7, seconds=[[1.0, 0.1], [2.0, 0.3]])
REQUEST = PlanRequest(
    number=7,
    problem=PROBLEM,
    settings=PlanSettings(pins=(("*", "fp8"),), seed=3),
    previous=plan_of(["fp8", "fp4"], step=10),
    step=20,
    metrics={"a": {"fp4": {"abs_error": 0.5, "rel_error": None}}, "b": {}},
)


def test_a_request_is_one_line_and_comes_back_as_it_was() -> None:
    pieces = list(encode_request(REQUEST))
    line = "".join(pieces)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert len(pieces) > len(PROBLEM.linears)  # written linear by linear
    got = decode_request(line)
    assert got.problem == PROBLEM
    assert (got.number, got.step, got.settings) == (7, 20, REQUEST.settings)
    assert (got.previous, got.metrics) == (REQUEST.previous, REQUEST.metrics)


def test_what_may_be_missing_may_be_missing() -> None:
    bare = PlanRequest(1, PROBLEM, PlanSettings(), None, 0, None)
    got = decode_request("".join(encode_request(bare)))
    assert (got.previous, got.metrics) == (None, None)


def test_a_plan_comes_back_as_it_was() -> None:
    plan = plan_of(["fp8", "fp4"], step=20)
    assert decode_reply(encode_plan(7, plan), REQUEST) == plan


def test_errors_come_back_as_what_they_were() -> None:
    infeasible = InfeasiblePlanError("too much", ("target 0.7", "pin *=fp8"), 0.25)
    with pytest.raises(InfeasiblePlanError, match="too much") as caught:
        decode_reply(encode_error(7, infeasible), REQUEST)
    assert caught.value.conflicts == infeasible.conflicts
    assert caught.value.best_target == 0.25
    with pytest.raises(UsageError, match="bad pin"):
        decode_reply(encode_error(7, UsageError("bad pin")), REQUEST)
    with pytest.raises(PlanningError, match="ZeroDivisionError: by zero"):
        decode_reply(encode_error(7, ZeroDivisionError("by zero")), REQUEST)


GOOD_PLAN = plan_of(["fp8", "fp4"], step=20)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense\n",
        "[]\n",
        "{}\n",
        '{"id": 7}\n',
        '{"id": 7, "plan": 3}\n',
        '{"id": 7, "error": "infeasible", "message": "no"}\n',
        encode_plan(6, GOOD_PLAN),
        encode_plan(7, plan_of(["fp8", "fp4"], step=19)),
        encode_plan(7, plan_of(["fp8"], step=20)),
        json.dumps({"id": 7, "plan": GOOD_PLAN.to_dict() | {"digest": "0"}}) + "\n",
    ],
)
def test_anything_else_is_an_error_that_keeps_the_old_plan(line: str) -> None:
    with pytest.raises(SnipError):
        decode_reply(line, REQUEST)
