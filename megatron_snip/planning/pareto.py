"""The frontier: least quality loss at every efficiency target.

Targets are solved from the highest down: an assignment that reaches a target reaches every lower
one, so each solution is a feasible hint for the next and the frontier cannot rise. Options are
names here; nothing asks what formats they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.cost import COST_MODELS
from megatron_snip.planning.plan import Status, relative_gap
from megatron_snip.planning.policies import Metrics, Request, get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.rules import make_rules, needs_bf16
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.table import make_table


@dataclass(frozen=True)
class ParetoPoint:
    """The best plan at one target.

    Attributes:
        target: least efficiency.
        status: None where no plan reaches the target; then the numbers below are None, too.
        objective: quality loss.
        bound: proven lower bound of it.
        efficiency: reached.
        seconds: wall time.
        options: how many linears take each option, by its name.
    """

    target: float
    status: Status | None
    objective: float | None
    bound: float | None
    efficiency: float | None
    seconds: float
    options: dict[str, int]

    @property
    def gap(self) -> float | None:
        """Relative gap; None where there is no plan."""
        return relative_gap(self.objective, self.bound)


def frontier(
    problem: PlanningProblem,
    settings: PlanSettings,
    targets: Sequence[float],
    metrics: Metrics | None = None,
) -> list[ParetoPoint]:
    """Plan at every target.

    Args:
        problem: its own target is ignored.
        settings: policy, balance, pins, limits; `time_limit_s` holds for each target.
        targets: efficiencies in [0, 1], in any order.
        metrics: local errors, for policies that score by them.

    Returns:
        One point a target, in ascending order of targets.

    Raises:
        UsageError: if problem and settings do not fit each other.
    """
    policy = get_policy(settings.policy)
    with_bf16 = policy.wants_bf16 or needs_bf16(settings)
    table = make_table(problem, COST_MODELS[settings.cost], with_bf16)
    hint, points = None, []
    for target in sorted(set(targets), reverse=True):
        deadline = Deadline(settings.time_limit_s)
        rules = make_rules(table, settings, target, None)
        try:
            decision = policy.decide(Request(rules, settings, hint, metrics, 0, deadline))
        except InfeasiblePlanError:
            points.append(ParetoPoint(target, None, None, None, None, deadline.elapsed(), {}))
            continue
        hint = decision.columns
        chosen = [names[j] for names, j in zip(table.options, hint.tolist(), strict=True)]
        objective = table.quality_loss(hint)
        points.append(
            ParetoPoint(
                target=target,
                status=decision.status,
                objective=objective,
                bound=None if decision.bound is None else min(decision.bound, objective),
                efficiency=table.efficiency(hint),
                seconds=deadline.elapsed(),
                options={name: chosen.count(name) for name in sorted(set(chosen))},
            )
        )
    return points[::-1]
