"""Two independent judges of plans: enumeration for small problems, HiGHS for medium ones.

Both work from the problem's numbers alone and share no code with the planner.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import scipy.optimize
import scipy.sparse

from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import LinearChoices, PlanningProblem
from megatron_snip.planning.settings import PlanSettings

SLACK = 1e-9
"""Efficiencies this far below the target still reach it."""


@dataclass(frozen=True)
class Choice:
    """One option of one linear, as numbers."""

    option: Option
    loss: float
    weight: float
    gain: float
    time: float
    changes: int


def choices_of(
    linear: LinearChoices, settings: PlanSettings, previous: PrecisionPlan | None
) -> list[Choice]:
    """Return what a linear may choose under pins, forbidden options and edge layers left out."""
    pins = {Option.parse(o) for glob, o in settings.pins if fnmatchcase(linear.name, glob)}
    rows = {Option.parse(name): cost for name, cost in linear.options.items()}
    before = None if previous is None else previous.linears[linear.name]
    seconds = [cost.seconds for cost in rows.values() if cost.seconds is not None]
    found = []
    for option, cost in rows.items():
        if cost.quality_loss is None or (pins and pins != {option}):
            continue
        if settings.cost == "time":
            weight, gain = max(seconds) - min(seconds), max(seconds) - (cost.seconds or 0.0)
            time = cost.seconds or 0.0
        else:
            weight, gain = linear.flops, linear.flops * cost.saving
            time = linear.flops - gain / 2
        changes = int(before is not None and before in rows and before != option)
        found.append(Choice(option, cost.quality_loss, weight, gain, time, changes))
    return found


def brute_force(
    problem: PlanningProblem, settings: PlanSettings, previous: PrecisionPlan | None = None
) -> float | None:
    """Return the least quality loss over all assignments that keep to every rule, or None."""
    menus = [choices_of(linear, settings, previous) for linear in problem.linears]
    if not all(menus):
        return None
    index = np.array(list(itertools.product(*(range(len(menu)) for menu in menus))))

    def table(field: str) -> np.ndarray:
        columns = [
            np.array([getattr(choice, field) for choice in menu], dtype=np.float64)[index[:, i]]
            for i, menu in enumerate(menus)
        ]
        return np.stack(columns, axis=1)

    loss, gain, time = table("loss").sum(1), table("gain"), table("time")
    weights = np.array([menu[0].weight for menu in menus])
    stages = np.array([linear.stage for linear in problem.linears])
    target = problem.target if settings.target is None else settings.target
    good = gain.sum(1) >= (target - SLACK) * weights.sum()
    if settings.max_changes is not None and previous is not None:
        good &= table("changes").sum(1) <= settings.max_changes
    for stage in sorted(set(stages.tolist())) if settings.pipeline_balance == "stage" else ():
        mine = stages == stage
        good &= gain[:, mine].sum(1) >= (target - SLACK) * weights[mine].sum()
    if not good.any():
        return None
    if settings.pipeline_balance == "bottleneck":
        slowest = np.stack([time[:, stages == s].sum(1) for s in sorted(set(stages))]).max(0)
        good &= slowest <= slowest[good].min() * (1 + 1e-12)
    return float(loss[good].min())


@dataclass(frozen=True)
class HighsModel:
    """The integer program as scipy.optimize.milp takes it.

    Attributes:
        loss: objective, scaled so that its largest coefficient is 1 (HiGHS has absolute
            tolerances).
        scale: what it was divided by.
        matrix: one row a linear, then one a constraint.
        low: least row sums.
        high: largest row sums.
    """

    loss: np.ndarray
    scale: float
    matrix: scipy.sparse.csr_matrix
    low: np.ndarray
    high: np.ndarray

    def solve(self, relative_gap: float = 0.0, time_limit_s: float = 60.0) -> float | None:
        """Return the objective of the best solution found; None if there is none."""
        result = scipy.optimize.milp(
            self.loss,
            constraints=scipy.optimize.LinearConstraint(self.matrix, self.low, self.high),
            bounds=scipy.optimize.Bounds(0, 1),
            integrality=np.ones(len(self.loss)),
            options={"mip_rel_gap": relative_gap, "time_limit": time_limit_s},
        )
        return None if result.x is None else float(result.fun) * self.scale


def highs_model(
    problem: PlanningProblem, settings: PlanSettings, previous: PrecisionPlan | None = None
) -> HighsModel | None:
    """Build the model; None if a linear has no choice.

    Heeds the target, stage balance, pins and the limit on changes; not the bottleneck.
    """
    menus = [choices_of(linear, settings, previous) for linear in problem.linears]
    if not all(menus):
        return None
    flat = [(i, choice) for i, menu in enumerate(menus) for choice in menu]
    owner = np.array([i for i, _ in flat])
    count = len(flat)
    rows = [scipy.sparse.csr_matrix((np.ones(count), (owner, np.arange(count))))]
    low, high = [np.ones(len(menus))], [np.ones(len(menus))]
    target = problem.target if settings.target is None else settings.target
    stage = np.array([problem.linears[i].stage for i in owner])
    groups = [np.ones(count, dtype=bool)]
    if settings.pipeline_balance == "stage":
        groups = [stage == s for s in sorted(set(stage.tolist()))]
    gain = np.array([choice.gain for _, choice in flat])
    weight = np.array([menu[0].weight for menu in menus])
    for mine in groups:
        total = weight[sorted(set(owner[mine].tolist()))].sum()
        if total > 0:
            rows.append(scipy.sparse.csr_matrix(np.where(mine, gain, 0.0) / total))
            low.append(np.array([target - SLACK]))
            high.append(np.array([np.inf]))
    if settings.max_changes is not None and previous is not None:
        rows.append(scipy.sparse.csr_matrix(np.array([float(c.changes) for _, c in flat])))
        low.append(np.array([-np.inf]))
        high.append(np.array([float(settings.max_changes)]))
    loss = np.array([choice.loss for _, choice in flat])
    scale = float(np.abs(loss).max()) or 1.0
    matrix = scipy.sparse.vstack(rows).tocsr()
    return HighsModel(loss / scale, scale, matrix, np.concatenate(low), np.concatenate(high))
