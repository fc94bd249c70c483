"""What crosses the pipe between a training process and its solver process: one JSON line each way.

    request   {"id", "step", "settings", "previous": plan | null, "metrics": ... | null, "problem"}
    reply     {"id", "plan"}  or  {"id", "error": kind, "message", "conflicts", "best_target"}

with kind one of `infeasible`, `usage`, `planning`. A request is written linear by linear, so that
encoding a large problem never holds the training process's interpreter lock for long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_snip.errors import InfeasiblePlanError, PlanningError, SnipError, UsageError
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.policies import Metrics
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The arguments of `make_plan`, with a number to match the reply by."""

    number: int
    problem: PlanningProblem
    settings: PlanSettings
    previous: PrecisionPlan | None
    step: int
    metrics: Metrics | None


def encode_request(request: PlanRequest) -> Iterator[str]:
    """Yield the pieces of the request's line, the newline included."""
    head = {
        "id": request.number,
        "step": request.step,
        "settings": request.settings.to_dict(),
        "previous": None if request.previous is None else request.previous.to_dict(),
    }
    yield json.dumps(head)[:-1] + ', "metrics": '
    if request.metrics is None:
        yield "null"
    else:
        yield "{"
        for i, (name, by_option) in enumerate(request.metrics.items()):
            yield (", " if i else "") + f"{json.dumps(name)}: {json.dumps(by_option)}"
        yield "}"
    problem = request.problem
    yield f', "problem": {{"version": {problem.version}, "target": {json.dumps(problem.target)}'
    yield ', "linears": ['
    for i, linear in enumerate(problem.linears):
        yield (", " if i else "") + linear.model_dump_json(exclude_none=False)
    yield "]}}\n"


def decode_request(line: str) -> PlanRequest:
    """Read a request's line; raises ValueError, KeyError or UsageError if it is not one."""
    value = json.loads(line)
    previous = value["previous"]
    return PlanRequest(
        number=value["id"],
        problem=PlanningProblem.from_dict(value["problem"]),
        settings=PlanSettings.from_dict(value["settings"]),
        previous=None if previous is None else PrecisionPlan.from_dict(previous),
        step=value["step"],
        metrics=value["metrics"],
    )


def encode_plan(number: int, plan: PrecisionPlan) -> str:
    """Return the reply's line for a plan."""
    return json.dumps({"id": number, "plan": plan.to_dict()}) + "\n"


def encode_error(number: int, error: Exception) -> str:
    """Return the reply's line for a failure."""
    reply: dict[str, Any] = {"id": number, "error": "planning", "message": str(error)}
    if isinstance(error, InfeasiblePlanError):
        reply["error"] = "infeasible"
        reply["conflicts"] = list(error.conflicts)
        reply["best_target"] = error.best_target
    elif isinstance(error, UsageError):
        reply["error"] = "usage"
    elif not isinstance(error, SnipError):
        reply["message"] = f"{type(error).__name__}: {error}"
    return json.dumps(reply) + "\n"


def decode_reply(line: str, request: PlanRequest) -> PrecisionPlan:
    """Read the reply to a request.

    Raises:
        InfeasiblePlanError: as the worker raised it, with conflicts and best target.
        UsageError: as the worker raised it.
        PlanningError: if the worker failed in another way, or the line is no reply to `request`.
    """
    try:
        value = json.loads(line)
        if value["id"] != request.number:
            raise PlanningError(f"the solver process answered request {value['id']!r}")
        if "error" in value:
            raise _error(value)
        plan = PrecisionPlan.from_dict(value["plan"])
        plan.check_against(request.problem.names)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanningError(
            f"the solver process sent garbage ({type(error).__name__}): {line[:80]!r}"
        ) from None
    if plan.step != request.step:
        raise PlanningError(f"the solver process sent the plan of step {plan.step}")
    return plan


def _error(value: dict[str, Any]) -> SnipError:
    message = str(value["message"])
    if value["error"] == "infeasible":
        return InfeasiblePlanError(message, tuple(value["conflicts"]), value["best_target"])
    if value["error"] == "usage":
        return UsageError(message)
    return PlanningError(message)
