"""What a policy is: it looks at a request and returns a decision.

Call order: the planner builds the table and the rules, asks the policy once (`decide`), applies
the minimum gain and validates the result. A policy never sees a step's tensors, only numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_snip.errors import UsageError
from megatron_snip.planning.clock import Deadline
from megatron_snip.planning.plan import Status
from megatron_snip.planning.problem import canonical
from megatron_snip.planning.rules import Rules
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.table import Ints, Table
from megatron_snip.planning.task import Task

Metrics = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""{linear: {option: {metric name: value}}}: what baselines score by."""


@dataclass(frozen=True, eq=False)
class Request:
    """Everything a policy may look at.

    Attributes:
        rules: the constraints; `rules.checked_task()` resolves them or says why it cannot.
        settings: seed, workers, gap.
        hint: [n], columns of the previous plan (-1 where the table lacks them), or None.
        metrics: local errors of the options, or None where the caller has none.
        step: training step.
        deadline: shared by all steps of the plan.
    """

    rules: Rules
    settings: PlanSettings
    hint: Ints | None
    metrics: Metrics | None
    step: int
    deadline: Deadline

    @property
    def table(self) -> Table:
        """The numbers."""
        return self.rules.table


@dataclass(frozen=True, eq=False)
class Decision:
    """What a policy chose.

    Attributes:
        columns: [n], a column of the table for each linear.
        status: what is known about it.
        bound: lower bound of the objective under the same rules, or None.
        error: what integer scaling may have cost, in units of quality loss.
        task: the rules it keeps to.
    """

    columns: Ints
    status: Status
    bound: float | None
    task: Task
    error: float = 0.0


class Policy(Protocol):
    """Decides the option of every linear.

    Attributes:
        name: as users write it.
        wants_bf16: whether the table must hold bf16 even where the problem does not list it.
        minimizes_loss: whether quality loss is what it minimizes, so that a plan that loses no
            less than the previous one is not worth a change.
        heeds_target: whether it reaches the efficiency target. One that does not has its own idea
            of what every linear takes; target and balance then mean nothing to it.
    """

    name: str
    wants_bf16: bool
    minimizes_loss: bool
    heeds_target: bool

    def decide(self, request: Request) -> Decision:
        """Choose a column for every linear.

        Raises:
            InfeasiblePlanError: if the policy heeds the rules and they cannot be met.
            UsageError: if the request lacks something that the policy needs.
        """


def metric_of(request: Request, policy: str, metric: str, row: int, column: int) -> float:
    """Return a metric of one option of one linear; inf where it was not finite when measured.

    Raises:
        UsageError: if the request carries no metrics or not this one.
    """
    if request.metrics is None:
        raise UsageError(
            f"policy '{policy}' scores by '{metric}', which problem files do not hold; "
            "give --statistics FILE (a run writes divergences/<step>.json beside problems/)"
        )
    name, option = request.table.names[row], request.table.options[row][column]
    by_option = {canonical(key): value for key, value in request.metrics.get(name, {}).items()}
    measured = by_option.get(option, {})
    if metric not in measured:
        raise UsageError(
            f"policy '{policy}' needs '{metric}' of option '{option}' for '{name}', "
            "which the statistics do not hold"
        )
    value = measured[metric]
    return float(value) if value is not None and math.isfinite(value) else math.inf
