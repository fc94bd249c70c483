"""An independent judge of plans: HiGHS, for problems that enumeration is too slow for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.sparse

from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.oracle import SLACK, choices_of


@dataclass(frozen=True)
class HighsModel:
    """The integer program as scipy.optimize.milp takes it.

    Attributes:
        loss: objective with the price of changes, scaled so that its largest coefficient is 1
            (HiGHS has absolute tolerances).
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

    It has the target, stage balance, pins and the price of changes; not the bottleneck.
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
    matrix = scipy.sparse.vstack(rows).tocsr()
    return HighsModel(loss / scale, scale, matrix, np.concatenate(low), np.concatenate(high))
