"""Independent judges of plans: enumeration for small problems, HiGHS for medium ones.

Both work from the problem's numbers alone and share no code with the planner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import scipy.optimize
import scipy.sparse

from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import LinearChoices, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.instances import Instance

SLACK = 1e-9
"""Efficiencies this far below the target still reach it."""


@dataclass(frozen=True)
class Choice:
    """One option of one linear, as numbers."""

    option: Option
    loss: float
    weight: float
    gain: float
    changes: int


def choices_of(
    linear: LinearChoices, settings: PlanSettings, previous: PrecisionPlan | None
) -> list[Choice]:
    """Return what a linear may choose: without forbidden options, and only what pins allow."""
    pins = {Option.parse(o) for glob, o in settings.pins if fnmatchcase(linear.name, glob)}
    costs = {Option.parse(name): cost for name, cost in linear.options.items()}
    available = {o: c for o, c in costs.items() if c.quality_loss is not None}
    before = None if previous is None else previous.linears[linear.name]
    seconds = [cost.seconds for cost in costs.values() if cost.seconds is not None]
    found = []
    for option, cost in available.items():
        if pins and pins != {option}:
            continue
        if settings.cost == "time":
            weight, gain = max(seconds) - min(seconds), max(seconds) - (cost.seconds or 0.0)
        else:
            weight, gain = linear.flops, linear.flops * cost.saving
        changes = int(before in available and before != option)
        found.append(Choice(option, cost.quality_loss, weight, gain, changes))
    return found


def num_changes(plan: PrecisionPlan, instance: Instance) -> int:
    """Return how many linears leave an available option of the previous plan."""
    return sum(
        choice.changes
        for linear in instance.problem.linears
        for choice in choices_of(linear, instance.settings, instance.previous)
        if choice.option == plan.linears[linear.name]
    )


def brute_force(
    problem: PlanningProblem, settings: PlanSettings, previous: PrecisionPlan | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return quality loss and number of changes of all assignments that keep to every rule.

    None if there is no such assignment.
    """
    choices = [choices_of(linear, settings, previous) for linear in problem.linears]
    if not all(choices):
        return None
    index = np.array(list(itertools.product(*(range(len(row)) for row in choices))))

    def table(field: str) -> np.ndarray:
        columns = [
            np.array([getattr(choice, field) for choice in row], dtype=np.float64)[index[:, i]]
            for i, row in enumerate(choices)
        ]
        return np.stack(columns, axis=1)

    gain = table("gain")
    weights = np.array([row[0].weight for row in choices])
    stages = np.array([linear.stage for linear in problem.linears])
    target = problem.target if settings.target is None else settings.target
    good = gain.sum(1) >= (target - SLACK) * weights.sum()
    for stage in sorted(set(stages.tolist())) if settings.pipeline_balance == "stage" else ():
        mine = stages == stage
        good &= gain[:, mine].sum(1) >= (target - SLACK) * weights[mine].sum()
    if not good.any():
        return None
    return table("loss").sum(1)[good], table("changes").sum(1)[good]


def highs_model(
    problem: PlanningProblem, settings: PlanSettings, previous: PrecisionPlan | None = None
) -> tuple[Callable[..., float | None], float] | None:
    """Build the integer program for HiGHS; None if a linear has no choice.

    It has the target, stage balance, pins and the price of changes.

    Returns:
        A function of the relative gap and the time limit, which returns the objective of the best
        solution found, or None; and the largest loss, because HiGHS has absolute tolerances.
    """
    choices = [choices_of(linear, settings, previous) for linear in problem.linears]
    if not all(choices):
        return None
    flat = [(i, choice) for i, row in enumerate(choices) for choice in row]
    owner = np.array([i for i, _ in flat])
    count = len(flat)
    rows = [scipy.sparse.csr_matrix((np.ones(count), (owner, np.arange(count))))]
    low, high = [np.ones(len(choices))], [np.ones(len(choices))]
    target = problem.target if settings.target is None else settings.target
    stage = np.array([problem.linears[i].stage for i in owner])
    groups = [np.ones(count, dtype=bool)]
    if settings.pipeline_balance == "stage":
        groups = [stage == s for s in sorted(set(stage.tolist()))]
    gain = np.array([choice.gain for _, choice in flat])
    weight = np.array([row[0].weight for row in choices])
    for mine in groups:
        total = weight[sorted(set(owner[mine].tolist()))].sum()
        if total > 0:
            rows.append(scipy.sparse.csr_matrix(np.where(mine, gain, 0.0) / total))
            low.append(np.array([target - SLACK]))
            high.append(np.array([np.inf]))
    penalty = settings.change_penalty
    loss = np.array([choice.loss + penalty * choice.changes for _, choice in flat])
    scale = float(np.abs(loss).max()) or 1.0
    limits = np.concatenate(low), np.concatenate(high)
    matrix = scipy.optimize.LinearConstraint(scipy.sparse.vstack(rows).tocsr(), *limits)

    def solve(relative_gap: float = 0.0, time_limit_s: float = 60.0) -> float | None:
        result = scipy.optimize.milp(
            loss / scale,
            constraints=matrix,
            bounds=scipy.optimize.Bounds(0, 1),
            integrality=np.ones(count),
            options={"mip_rel_gap": relative_gap, "time_limit": time_limit_s},
        )
        return None if result.x is None else float(result.fun) * scale

    return solve, scale
