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
from megatron_snip.files import PackedSchema
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
    problem: Annotated[PlanningProblem, PackedSchema()]


class Solver:
    """A problem in, a plan out: a function of all ranks that rank 0's process computes.

    The last answer is kept. So a problem may be asked again, as when Megatron repeats an iteration,
    and a plan is made once.
    """

    def __init__(
        self, settings: PlanSettings, control: Control, process: SolverProcess | None
    ) -> None:
        """Start with nothing to solve; `process` is None on ranks other than 0."""
        self._settings = settings
        self._control = control
        self._process = process
        # On rank 0: the last question, and its answer once `plan_of` has waited for it.
        self._question: tuple[PendingProblem, str] | None = None
        self._answer: PrecisionPlan | Exception | None = None

    def begin(self, pending: PendingProblem, plan: PrecisionPlan) -> None:
        """Start to solve a problem on rank 0, and return at once; `plan` is the current one.

        A problem that was asked last is not solved again.
        """
        # The current plan is a part of it: changes cost, and the solver starts from it.
        question = (pending, plan.digest)
        if self._process is None or question == self._question:
            return
        self._question = question
        self._answer = None
        try:
            self._process.submit(pending.problem, self._settings, plan, pending.iteration)
        except Exception as error:  # all ranks get it when the plan is due
            log_failure(logger, "giving a problem to the solver", error)
            self._answer = error

    def plan_of(self, pending: PendingProblem, plan: PrecisionPlan) -> tuple[dict[str, Any], float]:
        """All ranks: return rank 0's plan for a problem, and the seconds that training waited.

        The plan is `PrecisionPlan.to_dict`: a rank may fail to read it.

        Args:
            pending: the problem; `begin` was called with it, or is called now.
            plan: the current plan.

        Raises:
            PlanningError: the same on every rank, if there is no plan.
        """
        start = time.perf_counter()
        # Does nothing if it was the last question. It is not where Megatron repeats the iteration
        # of an older problem.
        self.begin(pending, plan)
        try:
            found = _from_rank_0(lambda: self._solved(pending.problem), self._control)
        except SnipError as error:
            why = f"no plan for the problem of iteration {pending.iteration}: {error}"
            raise PlanningError(why) from None
        return found, time.perf_counter() - start

    def close(self) -> None:
        """End the solver's process."""
        if self._process is not None:
            self._process.close()

    def _solved(self, problem: PlanningProblem) -> PrecisionPlan:
        """Rank 0: wait for the solver's plan, and check it against all that it must obey.

        Raises:
            PlanningError: if it is wrong; then the next problem gets a new solver process.
        """
        if self._answer is None:
            try:
                self._answer = self._checked(problem)
            except Exception as error:  # the answer to the same question is the same
                self._answer = error
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def _checked(self, problem: PlanningProblem) -> PrecisionPlan:
        assert self._process is not None, "rank 0 has the solver"
        plan = self._process.result(self._settings.time_limit_s + SOLVER_GRACE_S)
        policy = get_policy(self._settings.policy, problem)
        # `make_plan` has checked it, in the child. It is checked again where it enters the run.
        faults = find_violations(plan, problem, self._settings, policy.heeds_target)
        if faults:
            self._process.replace()
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
        RemoteFailure: on every rank, if it raised anything else.
    """
    # No vote on reading it: all ranks read the same text, and a start that fails ends the job.
    return PrecisionPlan.from_dict(_from_rank_0(make, control))


def _from_rank_0(make: Callable[[], PrecisionPlan], control: Control) -> dict[str, Any]:
    """All ranks: return the plan that rank 0 makes, as `PrecisionPlan.to_dict`."""

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

    found: dict[str, Any] = control.on_rank_0("planning", plan_dict)
    return found
