"""Check a plan against its problem without a solver, without arrays and without the planner's code.

Everything is recomputed from the problem file's numbers: each linear's option, the objective, the
efficiency of the model and of every stage, the digest, and every constraint in the settings. This
is the executable specification of a correct plan. It shares only the tolerance with the planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_snip.options import BF16, Option
from megatron_snip.planning.cost import TOLERANCE
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import glob_matches

_WITHOUT_TARGET = ("none", "uniform-")
"""Prefixes of the policies that ignore the target; they may use an unlisted bf16."""

_RELATIVE = 1e-9

_parse = lru_cache(maxsize=4096)(Option.parse)


@dataclass(frozen=True)
class _Chosen:
    """One linear under the plan.

    Attributes:
        linear: its numbers.
        option: that the plan has.
        cost: of the option.
        listed: whether the problem lists the option.
        pinned: the options that pins demand, with their names in messages.
    """

    linear: LinearChoices
    option: Option
    cost: OptionCost
    listed: bool
    pinned: list[tuple[str, str]]

    def weight_and_gain(self, cost_model: str) -> tuple[float, float]:
        """Return the largest possible gain and the gain; see `planning/cost.py`."""
        if cost_model == "flops":
            return self.linear.flops, self.linear.flops * self.cost.saving
        seconds = [cost.seconds or 0.0 for cost in self.linear.options.values()]
        return max(seconds) - min(seconds), max(seconds) - (self.cost.seconds or 0.0)

    def time(self, cost: OptionCost, cost_model: str) -> float:
        """Return the time of the linear under one of its options."""
        if cost_model == "time":
            return cost.seconds or 0.0
        return self.linear.flops * (1 - cost.saving / 2)


def find_violations(
    plan: PrecisionPlan, problem: PlanningProblem, settings: PlanSettings
) -> list[str]:
    """Return everything that is wrong with a plan, one line each; empty if it is correct.

    Args:
        plan: to be checked.
        problem: that it was made for.
        settings: under which it was made.
    """
    if set(plan.linears) != set(problem.names):
        return ["the plan's linears are not the problem's"]
    pinned = _pinned(problem, settings)
    chosen = []
    for linear in problem.linears:
        option = plan.linears[linear.name]
        costs = {_parse(name): cost for name, cost in linear.options.items()}
        if option not in costs and option != BF16:  # bf16 changes nothing and needs no listing
            return [f"'{linear.name}' has no option '{option}'"]
        cost = costs.get(option, OptionCost(quality_loss=0.0, saving=0.0))
        chosen.append(_Chosen(linear, option, cost, option in costs, pinned[linear.name]))
    faults = [*_check_numbers(plan, chosen, settings), *_check_options(chosen, settings)]
    if plan.digest != assignment_digest(plan.linears):
        faults.append("the digest does not match the assignment")
    if settings.policy.startswith(_WITHOUT_TARGET):
        faults += [] if plan.target == 0.0 else [f"target {plan.target} of a policy without one"]
    else:
        faults += _check_target(plan, problem, chosen, settings)
    return faults


def _pinned(problem: PlanningProblem, settings: PlanSettings) -> dict[str, list[tuple[str, str]]]:
    """Return the options that pins demand of each linear, by its name."""
    pinned: dict[str, list[tuple[str, str]]] = {name: [] for name in problem.names}
    for glob, option in settings.pins:
        for name in problem.names:
            if glob_matches(name, glob):
                pinned[name].append((option, f"pin {glob}"))
    for side, edge in (("first", settings.first_layers), ("last", settings.last_layers)):
        if edge is None:
            continue
        count, option = edge
        layers: dict[str, set[int]] = {}
        for name in problem.names:
            block, layer = _layer_of(name)
            layers.setdefault(block, set()).add(layer)
        for name in problem.names:
            block, layer = _layer_of(name)
            outer = [o for o in layers[block] if (o < layer if side == "first" else o > layer)]
            if len(outer) < count:
                pinned[name].append((option, f"{side} {count} layers"))
    return pinned


def _layer_of(name: str) -> tuple[str, int]:
    block, rest = name.split(".layers.")
    return block, int(rest.split(".")[0])


def _efficiency(chosen: list[_Chosen], cost_model: str) -> float:
    pairs = [each.weight_and_gain(cost_model) for each in chosen]
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
    known = [each.cost.quality_loss for each in chosen if each.cost.quality_loss is not None]
    objective = math.fsum(known) if len(known) == len(chosen) else None
    slack = _RELATIVE * math.fsum(map(abs, known))
    if objective is None or plan.objective is None:
        if objective != plan.objective:
            yield f"objective {plan.objective}, recomputed {objective}"
    elif abs(objective - plan.objective) > slack:
        yield f"objective {plan.objective}, recomputed {objective}"
    elif plan.bound is not None and plan.bound > objective + slack:
        yield f"bound {plan.bound} is above the objective {objective}"
    if abs(_efficiency(chosen, settings.cost) - plan.efficiency) > _RELATIVE:
        yield f"efficiency {plan.efficiency} is not that of the assignment"
    stages = _by_stage(chosen)
    if len(stages) != len(plan.stages):
        yield f"{len(plan.stages)} stages, the problem has {len(stages)}"
        return
    for p, (members, claimed) in enumerate(zip(stages, plan.stages, strict=True)):
        if abs(_efficiency(members, settings.cost) - claimed) > _RELATIVE:
            yield f"efficiency {claimed} of stage {p} is not that of the assignment"


def _check_options(chosen: list[_Chosen], settings: PlanSettings) -> Iterator[str]:
    for each in chosen:
        name, option = each.linear.name, each.option
        for wanted, pin in each.pinned:
            if option != _parse(wanted):
                yield f"'{name}' has {option}, and {pin} demands {wanted}"
        if each.cost.quality_loss is None:
            yield f"'{name}' has '{option}', which is forbidden"
        unlisted_allowed = each.pinned or settings.policy.startswith(_WITHOUT_TARGET)
        if not each.listed and not unlisted_allowed:
            yield f"'{name}' has '{option}', which is not available"


def _check_target(
    plan: PrecisionPlan, problem: PlanningProblem, chosen: list[_Chosen], settings: PlanSettings
) -> Iterator[str]:
    target = problem.target if settings.target is None else settings.target
    if plan.target != target:
        yield f"target {plan.target}, asked for {target}"
    least = target - float(TOLERANCE)
    if _efficiency(chosen, settings.cost) < least:
        yield f"efficiency {plan.efficiency} is below the target {target}"
    stages = _by_stage(chosen)
    if settings.pipeline_balance == "stage":
        for p, members in enumerate(stages):
            if _efficiency(members, settings.cost) < least:
                yield f"efficiency of stage {p} is below the target {target}"
    if settings.pipeline_balance == "bottleneck":
        taken = max(_stage_time(members, settings, fastest=False) for members in stages)
        needed = max(_stage_time(members, settings, fastest=True) for members in stages)
        if taken > needed * (1 + float(TOLERANCE)):
            yield f"the slowest stage takes {taken}, it could take {needed}"


def _stage_time(members: list[_Chosen], settings: PlanSettings, fastest: bool) -> float:
    """Return a stage's time under the plan, or with every free linear at its fastest option."""
    times = []
    for each in members:
        costs = [each.cost]
        if fastest and not each.pinned:
            costs = [c for c in each.linear.options.values() if c.quality_loss is not None]
        times.append(min(each.time(cost, settings.cost) for cost in costs))
    return math.fsum(times)
