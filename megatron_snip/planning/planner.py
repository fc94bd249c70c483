"""make_plan: problem -> table -> constraints -> policy -> checked plan."""

from __future__ import annotations

import time

from megatron_snip.errors import PlanningError
from megatron_snip.options import Option
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.constraints import changes, make_constraints
from megatron_snip.planning.cost import make_table
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.policies import Request, get_policy
from megatron_snip.planning.problem import PlanningProblem, check_options
from megatron_snip.planning.settings import PlanSettings


def make_plan(
    problem: PlanningProblem,
    settings: PlanSettings,
    previous: PrecisionPlan | None = None,
    iteration: int = 0,
) -> PrecisionPlan:
    """Decide the option of every linear.

    With one worker and no time limit reached, the same arguments give the same plan in any run.

    Args:
        problem: the linears and their options.
        settings: the constraints and the policy.
        previous: the current plan: a start for the search, and the reference of
            `settings.change_penalty`. It is returned unless the new plan is better.
        iteration: Megatron's (1-based) iteration of the statistics; 0 before training.

    Returns:
        A plan without `find_violations`.

    Raises:
        InfeasiblePlanError: no plan satisfies the constraints.
        UsageError: the problem, the settings and the previous plan do not fit each other.
        PlanningError: the result failed validation (a bug; nothing is returned).
    """
    start = time.monotonic()
    policy = get_policy(settings.policy)
    check_options(problem)
    table = make_table(problem, settings.cost)
    hint = None
    if previous is not None:
        previous.check_against(problem.names)
        hint = table.columns_of([str(previous.linears[name]) for name in table.names])
    target = problem.target if settings.target is None else settings.target
    constraints = make_constraints(table, settings, target, hint)
    deadline = start + settings.time_limit_s
    found = policy.decide(Request(constraints, settings, hint, iteration, deadline))
    columns, bound = found.columns, found.bound
    objective = table.quality_loss(columns)
    if bound is not None:
        num_changes = float(changes(table, hint)[table.rows, columns].sum())
        bound = min(bound - settings.change_penalty * num_changes, objective)
    texts = [table.options(row)[column] for row, column in enumerate(columns.tolist())]
    option_of = {text: Option.parse(text) for text in set(texts)}
    linears = {name: option_of[text] for name, text in zip(table.names, texts, strict=True)}
    plan = PrecisionPlan(
        iteration=iteration,
        policy=settings.policy,
        status=found.status,
        objective=objective,
        bound=bound,
        seconds=time.monotonic() - start,
        target=target if policy.heeds_target else 0.0,
        efficiency=table.efficiency(columns),
        stages=table.stage_efficiencies(columns),
        linears=linears,
        digest=assignment_digest(linears),
    )
    faults = find_violations(plan, problem, settings)
    if faults:
        raise PlanningError(f"policy '{settings.policy}' made an invalid plan: {faults[0]}")
    return plan
