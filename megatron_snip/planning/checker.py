"""Check a plan against its problem without a solver, without arrays and without the planner's code.

Everything is recomputed from the problem file's numbers: each linear's option, the objective, the
efficiency of the model and of every stage, the digest, and every constraint in the settings. This
is the executable specification of a correct plan. With the planner it shares only the tolerance and
what tied linears amount to. `make_plan` checks its own plan by it, and a run every answer of its
solver.
"""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from megatron_snip.config import EfficiencyMeasure
from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option
from megatron_snip.planning.option_table import TOLERANCE
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.problem import (
    LinearChoices,
    OptionCost,
    PlanningProblem,
    parse_option,
)
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.ties import merged
from megatron_snip.types import glob_matches, has_wildcards

_RELATIVE = 1e-9
"""Of differences between this file's sums of doubles and the planner's exact ones."""
_UNLISTED_BF16 = OptionCost(quality_loss=0.0, saving=0.0)


class _Numbers(NamedTuple):
    """One linear under the plan, as numbers of `planning/option_table.py`.

    Attributes:
        loss: Quality loss of the plan's option; None if the option is forbidden.
        max_gain: Largest possible gain of the linear.
        gain: Gain of the plan's option.
    """

    loss: float | None
    max_gain: float
    gain: float


def find_violations(
    plan: PrecisionPlan,
    problem: PlanningProblem,
    settings: PlanSettings,
    heeds_target: bool = True,
) -> list[str]:
    """Return everything that is wrong with a plan, one line each; empty if it is correct.

    Args:
        plan: The plan to check.
        problem: The problem that it was made for.
        settings: The rules under which it was made.
        heeds_target: Whether its policy reaches the target; another one may use an unlisted bf16.
    """
    try:
        plan.check_against(problem.names)
    except UsageError as error:
        return [f"the plan's linears are not the problem's: {error}"]
    faults: list[str] = []
    if plan.digest != assignment_digest(plan.linears):
        faults.append("the digest does not match the assignment")
    # bf16 has no quantization error, and so pins and some policies may use it unlisted.
    faults += broken_rules(plan, problem, settings, () if heeds_target else (BF16,))
    # From here on a group of tied linears counts as one, as the target counts it.
    problem = merged(problem)
    stages: list[list[_Numbers]] = [[] for _ in range(problem.num_stages)]
    for linear in problem.linears:
        own = _cost(linear, plan.linears[linear.name]) or _UNLISTED_BF16
        stages[linear.stage].append(_numbers(linear, own, settings.cost))

    target = problem.target if settings.target is None else settings.target
    balance = settings.pipeline_balance
    if not heeds_target:
        target = 0.0
        balance = "none"
    if plan.target != target:
        faults.append(f"target {plan.target}, asked for {target}")
    model = list(itertools.chain.from_iterable(stages))
    faults += _check_efficiency(plan, target, stages)
    if balance == "stage":
        for stage, members in enumerate(stages):
            found = _efficiency(members)
            if found < target - float(TOLERANCE):
                faults.append(f"efficiency {found} of stage {stage} is below the target {target}")
    faults += _check_objective(plan, [each.loss for each in model])
    return faults


def broken_rules(
    plan: PrecisionPlan,
    problem: PlanningProblem,
    settings: PlanSettings,
    unlisted: Container[Option] = (),
) -> list[str]:
    """Return which options a plan may not give its linears, whatever it saves; one line each.

    Args:
        plan: The plan to check, of the problem's linears.
        problem: The layers of the stages, ties and options.
        settings: The pins; the others are not used.
        unlisted: Options that a linear may have although the problem does not list them.
    """
    faults: list[str] = []
    if plan.stage_layers != problem.stage_layers:
        faults.append("the layers of the stages are not the problem's")
    for tied in problem.ties:
        if len({plan.linears[name] for name in tied}) > 1:
            faults.append(f"{', '.join(tied)} are tied and have different options")
    pins_of: dict[str, list[tuple[str, str]]] = {name: [] for name in problem.names}
    for glob, wanted in settings.pins:
        # A run can have a pin by name for each linear: these are looked up.
        names = pins_of if has_wildcards(glob) else pins_of.keys() & {glob}
        for name in names:
            if glob_matches(name, glob):
                pins_of[name].append((glob, wanted))
    group_of = {names[0]: names for names in problem.ties}
    for linear in merged(problem).linears:
        name = linear.name
        option = plan.linears[name]
        own = _cost(linear, option)
        # A pin of one of the tied linears holds for all of them.
        pins = [pin for each in group_of.get(name, (name,)) for pin in pins_of[each]]
        is_pinned_to_bf16 = option == BF16 and len(pins) > 0
        if own is None and not is_pinned_to_bf16 and option not in unlisted:
            faults.append(f"'{name}' has no option '{option}'")
        for glob, wanted in dict.fromkeys(pins):
            if option != parse_option(wanted):
                faults.append(f"'{name}' has {option}, and pin {glob} demands {wanted}")
        if own is not None and own.quality_loss is None:
            faults.append(f"'{name}' has '{option}', which is forbidden")
    return faults


def _cost(linear: LinearChoices, option: Option) -> OptionCost | None:
    """Return what an option costs a linear; None if the problem does not list it."""
    for text, cost in linear.options.items():
        if parse_option(text) == option:
            return cost
    return None


def _numbers(linear: LinearChoices, own: OptionCost, measure: EfficiencyMeasure) -> _Numbers:
    """Return the numbers of one linear.

    Args:
        linear: The linear and all of its options.
        own: The option that the plan gives to it.
        measure: What the target counts.
    """
    if measure == "flops":
        max_gain = linear.flops
        gain = linear.flops * own.saving
    else:
        all_times = [cost.seconds or 0.0 for cost in linear.options.values()]
        max_gain = max(all_times) - min(all_times)
        gain = max(all_times) - (own.seconds or 0.0)
    return _Numbers(
        loss=own.quality_loss,
        max_gain=max_gain,
        gain=gain,
    )


def _check_objective(plan: PrecisionPlan, losses: Sequence[float | None]) -> Iterator[str]:
    known = [loss for loss in losses if loss is not None]
    slack = _RELATIVE * math.fsum(map(abs, known))
    if len(known) < len(losses):  # a plan with a forbidden option has no objective
        if plan.objective is not None:
            yield f"objective {plan.objective}, recomputed None"
        return
    total = math.fsum(known)
    if plan.objective is None or abs(total - plan.objective) > slack:
        yield f"objective {plan.objective}, recomputed {total}"
    elif plan.bound is not None and plan.bound > total + slack:
        yield f"bound {plan.bound} is above the objective {total}"


def _check_efficiency(
    plan: PrecisionPlan, target: float, stages: Sequence[Sequence[_Numbers]]
) -> Iterator[str]:
    """Check the plan's efficiencies, and that of the model against the target."""
    if len(stages) != len(plan.stages):
        yield f"{len(plan.stages)} stages, the problem has {len(stages)}"
    found = _efficiency(list(itertools.chain.from_iterable(stages)))
    if found < target - float(TOLERANCE):
        yield f"efficiency {found} is below the target {target}"
    if abs(found - plan.efficiency) > _RELATIVE:
        yield f"efficiency {plan.efficiency} is not that of the assignment"
    # Not strict: another number of stages is a fault of its own, above.
    for stage, (members, claimed) in enumerate(zip(stages, plan.stages, strict=False)):
        if abs(_efficiency(members) - claimed) > _RELATIVE:
            yield f"efficiency {claimed} of stage {stage} is not that of the assignment"


def _efficiency(members: Sequence[_Numbers]) -> float:
    max_gain = math.fsum(each.max_gain for each in members)
    if max_gain == 0.0:
        return 1.0
    return math.fsum(each.gain for each in members) / max_gain
