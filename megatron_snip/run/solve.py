"""The solve that is under way: a problem on rank 0's solver, whose plan is due at an iteration.

All ranks call every method together. Training waits for the solver only at the iteration where
its plan is due. If rank 0 has no valid plan then (a crash, a timeout), all ranks get the same
error.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from megatron_snip.collectives import Control
from megatron_snip.errors import InfeasiblePlanError, PlanningError, SnipError, UsageError
from megatron_snip.files import OwnSchema
from megatron_snip.log import log_failure
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess

logger = logging.getLogger(__name__)

SOLVER_GRACE_S = 10.0
"""Training waits for a plan at most this long beyond the solver's time limit."""


@dataclass(frozen=True)
class PendingProblem:
    """A problem that the solver works on.

    Attributes:
        iteration: the iteration at which it was given to the solver.
        apply_at: the iteration before which the plan is broadcast and applied.
        problem: the planning problem.
    """

    iteration: int
    apply_at: int
    problem: Annotated[PlanningProblem, OwnSchema()]


class Solve:
    """The problem that rank 0's solver works on, if there is one."""

    def __init__(
        self, settings: PlanSettings, control: Control, solver: SolverProcess | None
    ) -> None:
        """Start with nothing to solve; `solver` is None on ranks other than 0."""
        self._pending: PendingProblem | None = None
        self._settings = settings
        self._control = control
        self._solver = solver
        self._submit_error: Exception | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a plan is still to come."""
        return self._pending is not None

    def submit(self, pending: PendingProblem, plan: PrecisionPlan) -> None:
        """Start to solve a problem on rank 0; `plan` is the current one."""
        self._pending = pending
        self._submit_error = None
        if self._solver is None:
            return
        try:
            self._solver.submit(pending.problem, self._settings, plan, pending.iteration)
        except Exception as error:  # all ranks get it when the plan is due
            log_failure(logger, "giving a problem to the solver", error)
            self._submit_error = error

    def is_due(self, iteration: int) -> bool:
        """Return whether the plan must be applied before an iteration."""
        return self._pending is not None and iteration >= self._pending.apply_at

    def take_plan(self) -> tuple[PrecisionPlan, float]:
        """Broadcast rank 0's plan; return it and the seconds that training waited for it.

        Raises:
            PlanningError: the same on every rank, if there is no plan.
        """
        assert self._pending is not None
        pending = self._pending
        self._pending = None
        begin = time.perf_counter()
        try:
            plan = plan_from_rank_0(lambda: self._solved(pending.problem), self._control)
        except SnipError as error:
            why = f"no plan for the problem of iteration {pending.iteration}: {error}"
            raise PlanningError(why) from None
        return plan, time.perf_counter() - begin

    def drop(self) -> None:
        """Forget the problem: its plan will not be applied."""
        self._pending = None

    def close(self) -> None:
        """End the solver's process."""
        if self._solver is not None:
            self._solver.close()

    def state_dict(self) -> PendingProblem | None:
        """Return what a checkpoint keeps: the problem, which a resumed run solves again."""
        return self._pending

    def load_state_dict(self, state: PendingProblem | None, plan: PrecisionPlan) -> None:
        """Start to solve a stopped run's problem again; `plan` is the current one."""
        if state is not None:
            self.submit(state, plan)

    def _solved(self, problem: PlanningProblem) -> PrecisionPlan:
        """Rank 0: wait for the solver's plan, and check it against all that it must obey.

        Raises:
            PlanningError: if it is wrong; then the next problem gets a new solver process.
        """
        if self._submit_error is not None:
            raise self._submit_error
        assert self._solver is not None, "rank 0 has the solver"
        plan = self._solver.result(self._settings.time_limit_s + SOLVER_GRACE_S)
        policy = get_policy(self._settings.policy, problem)
        faults = find_violations(plan, problem, self._settings, policy.heeds_target)
        if faults:
            self._solver.replace()
            more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
            raise PlanningError(f"the solver's plan is wrong: {faults[0]}{more}")
        return plan


def plan_from_rank_0(make: Callable[[], PrecisionPlan], control: Control) -> PrecisionPlan:
    """All ranks: return the plan that rank 0 makes.

    Args:
        make: called on rank 0 only.
        control: the control plane of all ranks.

    Raises:
        UsageError: on every rank, if `make` raised one or an InfeasiblePlanError.
        RemoteFailure: on every rank, if it raised anything else, or a rank cannot read the plan.
    """

    def plan_dict() -> dict[str, Any]:
        try:
            return make().to_dict()
        except InfeasiblePlanError as error:
            # Without a target that could be reached, pins contradict each other.
            pins_conflict = error.best_target is None and any(
                label.startswith("pin ") for label in error.conflicts
            )
            field = "pins" if pins_conflict else "efficiency_target"
            raise UsageError(str(error), field) from None

    found = control.on_rank_0("planning", plan_dict)
    return control.attempt("reading the plan", lambda: PrecisionPlan.from_dict(found))
