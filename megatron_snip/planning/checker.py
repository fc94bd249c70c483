"""Check a plan against its problem without a solver, without arrays and without the planner's code.

Everything is recomputed from the problem file's numbers: each linear's option, the objective, the
efficiency of the model and of every stage, the digest, and every constraint in the settings. This
is the executable specification of a correct plan. It shares only the tolerance with the planner.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_snip.options import BF16
from megatron_snip.planning.cost import TOLERANCE
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.problem import (
    LinearChoices,
    OptionCost,
    PlanningProblem,
    parse_option,
)
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import glob_matches

_RELATIVE = 1e-9
_UNLISTED_BF16 = OptionCost(quality_loss=0.0, saving=0.0)


class _Numbers(NamedTuple):
    """One linear under the plan, as numbers of `planning/cost.py`.

    Attributes:
        loss: quality loss; None if the option is forbidden.
        weight: largest possible gain.
        gain: of the option.
        time: of the option.
        fastest: least time that pins and forbidden options allow.
    """

    loss: float | None
    weight: float
    gain: float
    time: float
    fastest: float


def find_violations(
    plan: PrecisionPlan,
    problem: PlanningProblem,
    settings: PlanSettings,
    heeds_target: bool = True,
) -> list[str]:
    """Return everything that is wrong with a plan, one line each; empty if it is correct.

    Args:
        plan: the plan to check.
        problem: the problem that it was made for.
        settings: the rules under which it was made.
        heeds_target: whether its policy reaches the target; another one may use an unlisted bf16.
    """
    if set(plan.linears) != set(problem.names):
        return ["the plan's linears are not the problem's"]
    faults: list[str] = []
    stages: list[list[_Numbers]] = [[] for _ in range(problem.num_stages)]
    for linear in problem.linears:
        name = linear.name
        option = plan.linears[linear.name]
        pins = [(glob, wanted) for glob, wanted in settings.pins if glob_matches(name, glob)]
        costs = {parse_option(text): cost for text, cost in linear.options.items()}
        # bf16 changes nothing, and so pins and some policies may use it unlisted.
        if option not in costs and not (option == BF16 and (pins or not heeds_target)):
            faults.append(f"'{name}' has no option '{option}'")
        faults += [
            f"'{name}' has {option}, and pin {glob} demands {wanted}"
            for glob, wanted in pins
            if option != parse_option(wanted)
        ]
        own = costs.get(option, _UNLISTED_BF16)
        if own.quality_loss is None:
            faults.append(f"'{name}' has '{option}', which is forbidden")
        usable = [cost for cost in costs.values() if cost.quality_loss is not None]
        numbers = _numbers(linear, own, [own] if pins or not usable else usable, settings.cost)
        stages[linear.stage].append(numbers)
    faults += [
        f"{', '.join(names)} are tied and have different options"
        for names in problem.ties
        if len({plan.linears[name] for name in names}) > 1
    ]
    if plan.digest != assignment_digest(plan.linears):
        faults.append("the digest does not match the assignment")
    target = problem.target if settings.target is None else settings.target
    if not heeds_target:
        target = 0.0
    if plan.target != target:
        faults.append(f"target {plan.target}, asked for {target}")
    faults += _check_objective(plan, [each.loss for members in stages for each in members])
    balance = settings.pipeline_balance if heeds_target else "none"
    faults += _check_efficiency(plan, target, stages, balance)
    return faults


def _numbers(
    linear: LinearChoices, own: OptionCost, usable: Sequence[OptionCost], cost_model: str
) -> _Numbers:
    if cost_model == "flops":
        times = [linear.flops * (1 - cost.saving / 2) for cost in (own, *usable)]
        weight = linear.flops
        gain = linear.flops * own.saving
    else:
        every = [cost.seconds or 0.0 for cost in linear.options.values()]
        times = [cost.seconds or 0.0 for cost in (own, *usable)]
        weight = max(every) - min(every)
        gain = max(every) - times[0]
    return _Numbers(own.quality_loss, weight, gain, times[0], min(times[1:]))


def _check_objective(plan: PrecisionPlan, losses: Sequence[float | None]) -> Iterator[str]:
    known = [loss for loss in losses if loss is not None]
    slack = _RELATIVE * math.fsum(map(abs, known))
    total = math.fsum(known) if len(known) == len(losses) else None
    if total is None or plan.objective is None:
        is_wrong = plan.objective != total
    else:
        is_wrong = abs(total - plan.objective) > slack
    if is_wrong:
        yield f"objective {plan.objective}, recomputed {total}"
    elif total is not None and plan.bound is not None and plan.bound > total + slack:
        yield f"bound {plan.bound} is above the objective {total}"


def _check_efficiency(
    plan: PrecisionPlan, target: float, stages: list[list[_Numbers]], balance: str
) -> Iterator[str]:
    if len(stages) != len(plan.stages):
        yield f"{len(plan.stages)} stages, the problem has {len(stages)}"
    places = [("", [each for members in stages for each in members], plan.efficiency)]
    pairs = zip(stages, plan.stages, strict=False)
    places += [(f" of stage {p}", members, claimed) for p, (members, claimed) in enumerate(pairs)]
    for place, members, claimed in places:
        weight = math.fsum(each.weight for each in members)
        found = math.fsum(each.gain for each in members) / weight if weight else 1.0
        if abs(found - claimed) > _RELATIVE:
            yield f"efficiency {claimed}{place} is not that of the assignment"
        if found < target - float(TOLERANCE) and (not place or balance == "stage"):
            yield f"efficiency {found}{place} is below the target {target}"
    if balance == "bottleneck":
        taken = max(math.fsum(each.time for each in members) for members in stages)
        needed = max(math.fsum(each.fastest for each in members) for members in stages)
        if taken > needed * (1 + float(TOLERANCE)):
            yield f"the slowest stage takes {taken}, it could take {needed}"
