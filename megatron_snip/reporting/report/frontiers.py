"""The frontier of a run's last refresh, solved when the report is made."""

from __future__ import annotations

from megatron_snip.errors import SnipError
from megatron_snip.planning.pareto import frontier
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.table import canonical
from megatron_snip.reporting.figures.pareto import Frontier
from megatron_snip.reporting.run_record import RunRecord

TARGETS = tuple(k / 20 for k in range(21))
TIME_LIMIT_S = 2.0
"""Seconds a target; a large model's points may then be a little above the best."""


def frontier_of(run: RunRecord) -> Frontier | str:
    """Solve the run's last problem at all targets under the run's pins and balance.

    Returns:
        The frontier, or why there is none.
    """
    if run.problem is None or run.problem_step is None:
        return "The run has made no refresh."
    if run.snip is None:
        return "The run's settings are of another version of megatron-snip."
    rules = PlanSettings.from_config(run.snip).model_copy(
        update={
            "policy": "snip",
            "max_changes": None,
            "min_gain": 0.0,
            "time_limit_s": min(TIME_LIMIT_S, TIME_LIMIT_S),
        }
    )
    try:
        points = frontier(run.problem, rules, TARGETS)
    except SnipError as error:
        return f"It cannot be computed: {error}"
    if not any(point.objective is not None for point in points):
        return "No plan keeps to the run's pins and balance."
    loss = None if run.plan is None else quality_loss(run.problem, run.plan)
    return Frontier(run.name, run.problem_step, tuple(points), run.plan, loss)


def quality_loss(problem: PlanningProblem, plan: PrecisionPlan) -> float | None:
    """Return a plan's quality loss under a problem, or None if the problem does not know it."""
    total = 0.0
    for linear in problem.linears:
        if linear.name not in plan.linears:
            return None
        costs = {canonical(name): cost for name, cost in linear.options.items()}
        option = str(plan.linears[linear.name])
        loss = costs[option].quality_loss if option in costs else None
        if option == "bf16" and option not in costs:
            loss = 0.0  # what changes nothing costs nothing
        if loss is None:
            return None
        total += loss
    return total
