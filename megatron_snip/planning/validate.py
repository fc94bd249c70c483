"""Check a plan against its problem without a solver, without arrays and without the planner's code.

Everything is recomputed from the problem file's numbers: which option each linear has, the
objective, the efficiency overall and of every stage, the digest, and every rule in the settings.
This is the executable specification of what a correct plan is; it shares nothing with the code
that makes plans but the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from megatron_snip.options import BF16, Option
from megatron_snip.planning.cost import TOLERANCE
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings

_UNHEEDING = ("none", "uniform-")
"""Policies that heed no target. They may also want bf16 where it is not listed."""

_RELATIVE = 1e-9


@lru_cache(maxsize=4096)
def _parse(name: str) -> Option:
    return Option.parse(name)


@dataclass(frozen=True)
class _Chosen:
    """One linear under the plan: its numbers, and the same for every option it could have."""

    linear: LinearChoices
    option: Option
    cost: OptionCost
    offered: bool


def find_violations(
    plan: PrecisionPlan,
    problem: PlanningProblem,
    settings: PlanSettings,
    previous: PrecisionPlan | None = None,
) -> list[str]:
    """Return everything that is wrong with a plan, one line each; empty if it is correct.

    Args:
        plan: to be checked.
        problem: that it answers.
        settings: under which it was made.
        previous: the plan that changes were counted against.
    """
    if set(plan.linears) != set(problem.names):
        return ["the plan's linears are not the problem's"]
    chosen = []
    for linear in problem.linears:
        found = _look_up(linear, plan.linears[linear.name])
        if found is None:
            return [f"'{linear.name}' has no option '{plan.linears[linear.name]}'"]
        chosen.append(found)
    faults = [*_check_numbers(plan, chosen, settings), *_check_pins(chosen, settings)]
    if plan.digest != assignment_digest(plan.linears):
        faults.append("the digest does not match the assignment")
    faults += _check_offered(chosen, settings)
    if settings.policy.startswith(_UNHEEDING):
        faults += [] if plan.target == 0.0 else [f"target {plan.target} of a policy without one"]
    else:
        faults += _check_target(plan, problem, chosen, settings)
    faults += _check_changes(chosen, settings, previous)
    return faults


def _look_up(linear: LinearChoices, option: Option) -> _Chosen | None:
    for name, cost in linear.options.items():
        if _parse(name) == option:
            return _Chosen(linear, option, cost, offered=True)
    if option == BF16:  # changes nothing, so it needs no listing
        return _Chosen(linear, option, OptionCost(quality_loss=0.0, saving=0.0), offered=False)
    return None


def _weight_and_gain(chosen: _Chosen, cost_model: str) -> tuple[float, float]:
    """Return what a linear can save and what it saves; see `planning/cost.py` for the words."""
    if cost_model == "flops":
        return chosen.linear.flops, chosen.linear.flops * chosen.cost.saving
    seconds = [cost.seconds or 0.0 for cost in chosen.linear.options.values()]
    return max(seconds) - min(seconds), max(seconds) - (chosen.cost.seconds or 0.0)


def _efficiency(chosen: list[_Chosen], cost_model: str) -> float:
    pairs = [_weight_and_gain(each, cost_model) for each in chosen]
    weight = math.fsum(weight for weight, _ in pairs)
    return math.fsum(gain for _, gain in pairs) / weight if weight else 1.0


def _by_stage(chosen: list[_Chosen]) -> list[list[_Chosen]]:
    stages: list[list[_Chosen]] = [[] for _ in range(1 + max(c.linear.stage for c in chosen))]
    for each in chosen:
        stages[each.linear.stage].append(each)
    return stages


def _check_numbers(
    plan: PrecisionPlan, chosen: list[_Chosen], settings: PlanSettings
) -> Iterator[str]:
    losses = [each.cost.quality_loss for each in chosen]
    known = [loss for loss in losses if loss is not None]
    objective = math.fsum(known) if len(known) == len(losses) else None
    if (objective is None) != (plan.objective is None):
        yield f"objective {plan.objective}, recomputed {objective}"
    elif objective is not None and plan.objective is not None:
        scale = math.fsum(abs(loss) for loss in known)
        if abs(objective - plan.objective) > _RELATIVE * scale:
            yield f"objective {plan.objective}, recomputed {objective}"
        if plan.bound is not None and plan.bound > objective + _RELATIVE * scale:
            yield f"bound {plan.bound} is above the objective {objective}"
    if abs(_efficiency(chosen, settings.cost) - plan.efficiency) > _RELATIVE:
        yield f"efficiency {plan.efficiency} is not what the assignment gives"
    stages = _by_stage(chosen)
    if len(stages) != len(plan.stages):
        yield f"{len(plan.stages)} stages, the problem has {len(stages)}"
        return
    for p, (members, claimed) in enumerate(zip(stages, plan.stages, strict=True)):
        if abs(_efficiency(members, settings.cost) - claimed) > _RELATIVE:
            yield f"efficiency {claimed} of stage {p} is not what the assignment gives"


def _check_pins(chosen: list[_Chosen], settings: PlanSettings) -> Iterator[str]:
    for glob, option in settings.pins:
        for each in chosen:
            if fnmatchcase(each.linear.name, glob) and each.option != _parse(option):
                yield f"'{each.linear.name}' is pinned to {option} and has {each.option}"
    for each, option in _edges(chosen, settings):
        if each.option != _parse(option):
            yield f"'{each.linear.name}' is in an edge layer kept in {option}, has {each.option}"


def _edges(chosen: list[_Chosen], settings: PlanSettings) -> Iterator[tuple[_Chosen, str]]:
    """Yield the linears of the first and last layers with the option they must have."""
    if settings.first_layers is None and settings.last_layers is None:
        return
    blocks: dict[str, set[int]] = {}
    places = []
    for each in chosen:
        block, rest = each.linear.name.split(".layers.")
        places.append((block, int(rest.split(".")[0])))
        blocks.setdefault(block, set()).add(places[-1][1])
    for each, (block, layer) in zip(chosen, places, strict=True):
        layers = blocks[block]
        if settings.first_layers is not None:
            count, option = settings.first_layers
            if sum(other < layer for other in layers) < count:
                yield each, option
        if settings.last_layers is not None:
            count, option = settings.last_layers
            if sum(other > layer for other in layers) < count:
                yield each, option


def _pinned(each: _Chosen, settings: PlanSettings, edges: set[str]) -> bool:
    name = each.linear.name
    return name in edges or any(fnmatchcase(name, glob) for glob, _ in settings.pins)


def _check_offered(chosen: list[_Chosen], settings: PlanSettings) -> Iterator[str]:
    edges = {each.linear.name for each, _ in _edges(chosen, settings)}
    unasked = not settings.policy.startswith(_UNHEEDING)
    for each in chosen:
        if each.cost.quality_loss is None:
            yield f"'{each.linear.name}' has '{each.option}', which is forbidden"
        if unasked and not each.offered and not _pinned(each, settings, edges):
            yield f"'{each.linear.name}' has '{each.option}', which is not on offer"


def _check_target(
    plan: PrecisionPlan, problem: PlanningProblem, chosen: list[_Chosen], settings: PlanSettings
) -> Iterator[str]:
    target = problem.target if settings.target is None else settings.target
    if plan.target != target:
        yield f"target {plan.target}, asked for {target}"
    least = target - float(TOLERANCE)
    if _efficiency(chosen, settings.cost) < least:
        yield f"efficiency {plan.efficiency} is below the target {target}"
    if settings.pipeline_balance == "stage":
        for p, members in enumerate(_by_stage(chosen)):
            if _efficiency(members, settings.cost) < least:
                yield f"efficiency of stage {p} is below the target {target}"
    if settings.pipeline_balance == "bottleneck" and settings.max_changes is None:
        yield from _check_bottleneck(chosen, settings)


def _check_bottleneck(chosen: list[_Chosen], settings: PlanSettings) -> Iterator[str]:
    """Without a limit on changes the least time of the slowest stage is that of all-fastest."""
    edges = {each.linear.name for each, _ in _edges(chosen, settings)}
    taken, least = [], []
    for members in _by_stage(chosen):
        taken.append(math.fsum(_time(each, each.cost, settings) for each in members))
        fastest = []
        for each in members:
            costs = [c for c in each.linear.options.values() if c.quality_loss is not None]
            if _pinned(each, settings, edges):
                costs = [each.cost]
            fastest.append(min(_time(each, cost, settings) for cost in costs))
        least.append(math.fsum(fastest))
    if max(taken) > max(least) * (1 + float(TOLERANCE)):
        yield f"the slowest stage takes {max(taken)}, it could take {max(least)}"


def _time(each: _Chosen, cost: OptionCost, settings: PlanSettings) -> float:
    if settings.cost == "time":
        return cost.seconds or 0.0
    return each.linear.flops * (1 - cost.saving / 2)


def _check_changes(
    chosen: list[_Chosen], settings: PlanSettings, previous: PrecisionPlan | None
) -> Iterator[str]:
    if previous is None or settings.max_changes is None:
        return
    changes = 0
    for each in chosen:
        before = previous.linears[each.linear.name]
        listed = any(_parse(name) == before for name in each.linear.options)
        changes += listed and before != each.option
    if changes > settings.max_changes:
        yield f"{changes} linears change, at most {settings.max_changes} may"
