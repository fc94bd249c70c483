"""The frontier: least quality loss at every efficiency target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.planning.constraints import make_constraints
from megatron_snip.planning.cost import make_table
from megatron_snip.planning.plan import Status, relative_gap
from megatron_snip.planning.policies import Request, get_policy
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
    for the next, and the frontier cannot rise. Option names need no meaning here.

    Args:
        problem: its own target is ignored.
        settings: policy, balance, pins, limits; `time_limit_s` holds for each target.
        targets: efficiencies in [0, 1], in any order.

    Returns:
        One point a target, in ascending order of targets.

    Raises:
        UsageError: if problem and settings do not fit each other.
    """
    policy, table = get_policy(settings.policy), make_table(problem, settings.cost)
    hint, points = None, []
    for target in sorted(set(targets), reverse=True):
        start = time.monotonic()
        constraints = make_constraints(table, settings, target, None)
        try:
            deadline = start + settings.time_limit_s
            found = policy.decide(Request(constraints, settings, hint, 0, deadline))
        except InfeasiblePlanError:
            points.append(ParetoPoint(target, seconds=time.monotonic() - start))
            continue
        hint = found.columns
        objective = table.quality_loss(hint)
        counts = Counter(table.options(row)[column] for row, column in enumerate(hint.tolist()))
        points.append(
            ParetoPoint(
                target=target,
                status=found.status,
                objective=objective,
                bound=None if found.bound is None else min(found.bound, objective),
                efficiency=table.efficiency(hint),
                seconds=time.monotonic() - start,
                options=dict(sorted(counts.items())),
            )
        )
    return points[::-1]
