"""make_plan: problem -> table -> rules -> policy -> checked plan."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_snip.errors import PlanningError
from megatron_snip.options import Option
from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.cost import COST_MODELS
from megatron_snip.planning.plan import PrecisionPlan, Status, assignment_digest
from megatron_snip.planning.policies import Decision, Metrics, Request, get_policy
from megatron_snip.planning.problem import PlanningProblem, check_options
from megatron_snip.planning.rules import make_rules, needs_bf16
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.table import Ints, Table, make_table
from megatron_snip.planning.validate import find_violations


@dataclass(frozen=True)
class PlanReport:
    """A plan with what its file does not hold.

    Attributes:
        plan: the plan.
        scaling_error: bound on how far integer scaling may have moved objective and bound, in
            units of quality loss; `plan.bound` already allows for it.
        efficiency_error: bound on how far below its target the efficiency may be for the same
            reason; 0 where FLOPs and savings share a unit, as real ones do.
    """

    plan: PrecisionPlan
    scaling_error: float
    efficiency_error: float


def make_plan(
    problem: PlanningProblem,
    settings: PlanSettings,
    previous: PrecisionPlan | None = None,
    step: int = 0,
    metrics: Metrics | None = None,
) -> PrecisionPlan:
    """Decide the option of every linear.

    Args:
        problem: what is to be decided.
        settings: under which rules; with one worker and no time limit reached, the same
            arguments give the same plan on any run.
        previous: the plan in force; the hint, and what changes and gains are counted against.
        step: training step of the statistics, 0-based; goes into the plan.
        metrics: {linear: {option: {metric: value}}} for policies that score by local errors.

    Returns:
        A plan that `validate.find_violations` has nothing to say about.

    Raises:
        InfeasiblePlanError: no plan satisfies the rules.
        UsageError: the problem, the settings and the previous plan do not fit each other.
        PlanningError: the result failed validation (a bug; nothing is returned).
    """
    return make_plan_report(problem, settings, previous, step, metrics).plan


def make_plan_report(
    problem: PlanningProblem,
    settings: PlanSettings,
    previous: PrecisionPlan | None = None,
    step: int = 0,
    metrics: Metrics | None = None,
) -> PlanReport:
    """Do as `make_plan` does and return the report as well."""
    deadline = Deadline(settings.time_limit_s)
    policy = get_policy(settings.policy)
    check_options(problem)
    if previous is not None:
        previous.check_against(problem.names)
    with_bf16 = policy.wants_bf16 or needs_bf16(settings)
    table = make_table(problem, COST_MODELS[settings.cost], with_bf16)
    hint = _columns(table, previous)
    target = problem.target if settings.target is None else settings.target
    rules = make_rules(table, settings, target, hint)
    decision = policy.decide(Request(rules, settings, hint, metrics, step, deadline))
    if policy.minimizes_loss or settings.min_gain > 0:
        decision = _worth_changing(decision, table, settings.min_gain, hint)
    held_to = target if policy.heeds_target else 0.0
    plan = _plan(decision, table, settings, held_to, step, deadline)
    faults = find_violations(plan, problem, settings, previous)
    if faults:
        raise PlanningError(f"policy '{settings.policy}' made an invalid plan: {faults[0]}")
    return PlanReport(plan, decision.error, table.efficiency_error)


def _columns(table: Table, previous: PrecisionPlan | None) -> Ints | None:
    if previous is None:
        return None
    return table.columns_of([str(previous.linears[name]) for name in table.names])


def _worth_changing(
    decision: Decision, table: Table, min_gain: float, hint: Ints | None
) -> Decision:
    """Return the previous assignment where the new one gains too little over it."""
    if hint is None or not decision.task.holds(hint):
        return decision
    new, old = table.quality_loss(decision.columns), table.quality_loss(hint)
    if new < old and old - new >= min_gain * abs(old):
        return decision
    status: Status = decision.status if old <= new else "kept"
    return Decision(hint, status, decision.bound, decision.task, decision.error)


def _plan(
    decision: Decision,
    table: Table,
    settings: PlanSettings,
    target: float,
    step: int,
    deadline: Deadline,
) -> PrecisionPlan:
    chosen = zip(table.names, table.options, decision.columns.tolist(), strict=True)
    texts = {name: options[column] for name, options, column in chosen}
    option_of = {text: Option.parse(text) for text in set(texts.values())}
    linears = {name: option_of[text] for name, text in texts.items()}
    objective = table.quality_loss(decision.columns)
    return PrecisionPlan(
        step=step,
        policy=settings.policy,
        status=decision.status,
        objective=objective,
        bound=None if decision.bound is None else min(decision.bound, objective),
        seconds=deadline.elapsed(),
        target=target,
        efficiency=table.efficiency(decision.columns),
        stages=table.stage_efficiencies(decision.columns),
        linears=linears,
        digest=assignment_digest(linears),
    )
