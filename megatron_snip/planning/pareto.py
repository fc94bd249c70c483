"""The frontier: least quality loss at every efficiency target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings


class ParetoPoint(NamedTuple):
    """The best plan at one target.

    Attributes:
        target: least efficiency.
        plan: the plan; None if none reaches the target.
        seconds: wall time.
    """

    target: float
    plan: PrecisionPlan | None
    seconds: float


def frontier(
    problem: PlanningProblem, settings: PlanSettings, targets: Sequence[float]
) -> list[ParetoPoint]:
    """Plan at every target, from the highest down.

    An assignment that reaches a target reaches every lower one. So each solution is a feasible hint
    for the next, and the frontier cannot rise.

    Args:
        problem: its own target is ignored.
        settings: policy, balance, pins, limits; `time_limit_s` holds for each target.
        targets: efficiencies in [0, 1], in any order.

    Returns:
        One point a target, in ascending order of targets.

    Raises:
        UsageError: if problem and settings do not fit each other.
    """
    previous, points = None, []
    for target in sorted(set(targets), reverse=True):
        start = time.monotonic()
        own = settings.model_copy(update={"target": target, "change_penalty": 0.0})
        try:
            previous = make_plan(problem, own, previous)
            points.append(ParetoPoint(target, previous, previous.seconds))
        except InfeasiblePlanError:
            points.append(ParetoPoint(target, None, time.monotonic() - start))
    return points[::-1]
