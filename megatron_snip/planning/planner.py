"""Making plans from problems.

make_plan   problem -> table -> constraints -> policy -> checked plan
frontier    the plans of many targets
"""

import contextlib
import time
from collections.abc import Callable, Sequence

from megatron_snip.errors import InfeasiblePlanError, PlanningError
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.constraints import changes, make_constraints
from megatron_snip.planning.option_table import make_table
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.policies import Request, get_policy
from megatron_snip.planning.problem import PlanningProblem, parse_option
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.ties import merged, spread


def make_plan(
    problem: PlanningProblem,
    settings: PlanSettings,
    previous: PrecisionPlan | None = None,
    iteration: int = 0,
) -> PrecisionPlan:
    """Decide the option of every linear.

    With one worker and no time limit reached, the same arguments give the same plan in any run.

    Args:
        problem: The linears and their options.
        settings: The constraints and the policy.
        previous: The current plan, from which `settings.change_penalty` counts changes. The policy
            `snip` starts from it, and keeps it unless it finds a better one. For policies that
            order linears or GEMMs the penalty only decides between options of a linear that
            count equally towards the target, such as fp4 and mxfp4.
        iteration: Megatron's (1-based) iteration at which the plan is asked for; 0 before training.

    Returns:
        A plan in which `find_violations` finds nothing.

    Raises:
        InfeasiblePlanError: no plan satisfies the constraints.
        UsageError: the problem, the settings and the previous plan do not fit each other.
        PlanningError: the result failed validation (a bug; nothing is returned).
    """
    start = time.monotonic()
    if previous is not None:
        previous.check_against(problem.names)
    # Tied linears (they must have the same option) are one row of the table, until `spread`.
    merged_problem = merged(problem)
    policy = get_policy(settings.policy, merged_problem)
    table = make_table(merged_problem, settings.cost)
    hint = None
    if previous is not None:
        hint = table.columns_of([str(previous.linears[name]) for name in table.names])
    target = problem.target if settings.target is None else settings.target
    constraints = make_constraints(table, settings, target, hint, problem.ties)
    deadline = start + settings.time_limit_s
    found = policy.decide(Request(constraints, settings, hint, deadline))

    columns = found.columns
    linears = {}
    for row, column in enumerate(columns.tolist()):
        linears[table.names[row]] = parse_option(table.options(row)[column])
    linears = spread(linears, problem)
    quality_loss = table.quality_loss(columns)
    # `found.bound` bounds the quality loss plus the price of changes, which the solver minimizes.
    # Minus the price of this plan's n changes, it bounds the quality loss of every plan with n
    # changes or fewer.
    num_changes = float(changes(table, hint)[table.rows, columns].sum())
    bound = found.bound - settings.change_penalty * num_changes
    plan = PrecisionPlan(
        iteration=iteration,
        policy=settings.policy,
        status=found.status,
        objective=quality_loss,
        bound=min(bound, quality_loss),
        seconds=time.monotonic() - start,
        target=target if policy.heeds_target else 0.0,
        efficiency=table.efficiency(columns),
        stages=table.stage_efficiencies(columns),
        stage_layers=problem.stage_layers,
        linears=linears,
        digest=assignment_digest(linears),
    )
    # Also what a plugin's policy and the solver made: nothing else checks it before it trains.
    faults = find_violations(plan, problem, settings, policy.heeds_target)
    if faults:
        raise PlanningError(f"policy '{settings.policy}' made an invalid plan: {faults[0]}")
    return plan


def frontier(
    problem: PlanningProblem,
    settings: PlanSettings,
    targets: Sequence[float],
    progress: Callable[[float], object] = lambda share: None,
) -> dict[float, PrecisionPlan | None]:
    """Plan at every target. With policy `snip` a lower target never has a higher quality loss.

    Args:
        problem: The linears and their options; the problem's own target is ignored.
        settings: Policy, balance, pins and limits; `time_limit_s` holds for each target.
        targets: Efficiencies in [0, 1], in any order.
        progress: Called with the share of the targets that are done, from 0 to 1.

    Returns:
        The policy's plan at each target, in ascending order of targets; None where no plan reaches
        the target. The plans of policy `snip` are optimal to within `settings.gap`, unless the time
        limit ends the search.

    Raises:
        UsageError: if problem and settings do not fit each other.
    """
    plans: dict[float, PrecisionPlan | None] = dict.fromkeys(sorted(targets))
    previous = None
    # From the highest target down: an assignment that reaches a target reaches every lower one. So
    # each plan is a feasible hint for the next.
    for num_done, target in enumerate(reversed(plans)):
        progress(num_done / len(plans))
        own = settings.model_copy(update={"target": target, "change_penalty": 0.0})
        with contextlib.suppress(InfeasiblePlanError):
            previous = make_plan(problem, own, previous)
            plans[target] = previous
    return plans
