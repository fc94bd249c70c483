"""The frontier: least quality loss at every efficiency target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.planning.plan import Status, relative_gap
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings


@dataclass(frozen=True)
class ParetoPoint:
    """The best plan at one target; without a plan only target and seconds are known.

    Attributes:
        target: least efficiency.
        status: as a plan's; None where no plan reaches the target.
        objective: quality loss.
        bound: proven lower bound of it.
        efficiency: of the plan.
        seconds: wall time.
        options: number of linears with each option, by its name.
    """

    target: float
    status: Status | None = None
    objective: float | None = None
    bound: float | None = None
    efficiency: float | None = None
    seconds: float = 0.0
    options: dict[str, int] = field(default_factory=dict)

    @property
    def gap(self) -> float | None:
        """Relative gap; None where there is no plan."""
        return relative_gap(self.objective, self.bound)


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
            plan = previous = make_plan(problem, own, previous)
        except InfeasiblePlanError:
            points.append(ParetoPoint(target, seconds=time.monotonic() - start))
            continue
        options = dict(sorted(Counter(map(str, plan.linears.values())).items()))
        values = plan.status, plan.objective, plan.bound, plan.efficiency, plan.seconds
        points.append(ParetoPoint(target, *values, options))
    return points[::-1]
