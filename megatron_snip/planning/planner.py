"""Making plans from problems, and changing plans and problems to fit a run.

make_plan         problem -> table -> constraints -> policy -> checked plan
frontier          the plans of many targets
nearest_option    the option of no lower precision that stands in for another
restrict_problem  a problem without the options that linears cannot run
healing_problem   a problem whose plans raise some GEMMs of a plan before the others
"""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence

from megatron_snip.config import SnipConfig
from megatron_snip.errors import InfeasiblePlanError, PlanningError
from megatron_snip.formats import get_format
from megatron_snip.options import BF16, Option
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.constraints import changes, make_constraints
from megatron_snip.planning.cost import TOLERANCE, make_table
from megatron_snip.planning.plan import (
    PrecisionPlan,
    assignment_digest,
)
from megatron_snip.planning.policies import Request, get_policy
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import Gemm

Refusals = Mapping[Option, Mapping[str, str]]
"""Option -> linears that cannot run it -> reason."""


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
    policy = get_policy(settings.policy, problem)
    table = make_table(problem, settings.cost)
    hint = None
    if previous is not None:
        previous.check_against(problem.names)
        hint = table.columns_of([str(previous.linears[name]) for name in table.names])
    target = problem.target if settings.target is None else settings.target
    constraints = make_constraints(table, settings, target, hint)
    deadline = start + settings.time_limit_s
    found = policy.decide(Request(constraints, settings, hint, deadline))
    columns, objective = found.columns, table.quality_loss(found.columns)
    num_changes = float(changes(table, hint)[table.rows, columns].sum())
    linears = {
        name: parse_option(table.options(row)[column])
        for row, (name, column) in enumerate(zip(table.names, columns.tolist(), strict=True))
    }
    plan = PrecisionPlan(
        iteration=iteration,
        policy=settings.policy,
        status=found.status,
        objective=objective,
        bound=min(found.bound - settings.change_penalty * num_changes, objective),
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


def frontier(
    problem: PlanningProblem, settings: PlanSettings, targets: Sequence[float]
) -> dict[float, PrecisionPlan | None]:
    """Plan at every target, from the highest down.

    An assignment that reaches a target reaches every lower one. So each plan is a feasible hint for
    the next, and a lower target never has a higher quality loss.

    Args:
        problem: its own target is ignored.
        settings: policy, balance, pins, limits; `time_limit_s` holds for each target.
        targets: efficiencies in [0, 1], in any order.

    Returns:
        The best plan of each target, in ascending order of targets; None where none reaches it.

    Raises:
        UsageError: if problem and settings do not fit each other.
    """
    plans: dict[float, PrecisionPlan | None] = dict.fromkeys(sorted(targets))
    previous = None
    for target in reversed(plans):
        own = settings.model_copy(update={"target": target, "change_penalty": 0.0})
        with contextlib.suppress(InfeasiblePlanError):
            plans[target] = previous = make_plan(problem, own, previous)
    return plans


def without_objective(plan: PrecisionPlan) -> PrecisionPlan:
    """Return the plan of a problem without measurements: its quality loss is not known.

    That of BF16 in all linears is known: it is 0.
    """
    if set(plan.linears.values()) == {BF16}:
        return plan
    return plan.model_copy(update={"objective": None, "bound": None})


def nearest_option(option: Option, candidates: Iterable[Option]) -> Option:
    """Return `option` if it is a candidate, else the nearest one of no lower precision, else BF16.

    That is one with at least as many bits in every GEMM and the fewest bits in total; the first of
    them on a tie.
    """
    options = (*candidates, BF16)
    if option in options:
        return option
    fits = [o for o in options if all(a >= b for a, b in zip(_bits(o), _bits(option), strict=True))]
    return min(fits, key=lambda other: sum(_bits(other)))


def restrict_problem(problem: PlanningProblem, refusals: Refusals) -> PlanningProblem:
    """Return a problem whose linears list only what they can run; BF16 if that is nothing."""
    bf16 = {str(BF16): OptionCost(quality_loss=0.0, saving=0.0)}

    def left(row: LinearChoices) -> dict[str, OptionCost]:
        options = row.options.items()
        runs = {n: c for n, c in options if row.name not in refusals.get(parse_option(n), {})}
        return runs or bf16

    return problem.with_options(left)


def healing_problem(
    problem: PlanningProblem, plan: PrecisionPlan, config: SnipConfig
) -> PlanningProblem:
    """Return a problem whose plans lower no GEMM of `plan`, and raise some GEMMs before the others.

    Options are left out. While the target is above the share of the GEMMs that come second, these
    stay as in `plan`. Below it, the GEMMs that come first stay above the lowest precision. Pinned
    linears keep all options; so do all linears if `plan` does not reach the target.

    Args:
        problem: with options per GEMM.
        plan: the current plan.
        config: `heal_order` (forward or backward), pins and formats.
    """
    if plan.efficiency < problem.target - float(TOLERANCE):
        return problem
    lowest, is_forward = get_format(config.lowest_format).bits, config.heal_order == "forward"
    is_first = [(gemm == Gemm.FPROP) == is_forward for gemm in Gemm]
    bits = {name: _bits(option) for name, option in plan.linears.items()}
    low_later = {
        name: sum(b == lowest and not first for b, first in zip(found, is_first, strict=True))
        for name, found in bits.items()
    }
    share = sum(row.flops * low_later[row.name] / 3 for row in problem.linears)
    first_are_raised = problem.target * sum(row.flops for row in problem.linears) < share

    def may_become(old: int, new: int, first: bool) -> bool:
        if new < old:
            return False
        if first:
            return new > lowest or not first_are_raised
        return new == old or first_are_raised

    def left(row: LinearChoices) -> dict[str, OptionCost]:
        if config.pin_of(row.name) is not None:
            return row.options
        raised = {
            text: cost
            for text, cost in row.options.items()
            if all(map(may_become, bits[row.name], _bits(parse_option(text)), is_first))
        }
        return raised or row.options

    return problem.with_options(left)


def reasons(refused: Mapping[str, str]) -> str:
    """Return the first three distinct reasons why linears cannot run an option, in one line."""
    distinct = list(dict.fromkeys(refused.values()))
    more = f" and {len(distinct) - 3} other reasons" if len(distinct) > 3 else ""
    return "; ".join(distinct[:3]) + more


def _bits(option: Option) -> list[int]:
    return [get_format(name).bits for name in option.formats]
