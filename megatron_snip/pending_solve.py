"""PendingSolve: rank 0 gives a problem to the solver's process; later all ranks get the plan.

Training waits for the solver only at the iteration where its plan is due. If anything went wrong on
rank 0 until then (a crash, an invalid plan, no plan in time), all ranks get the error instead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from megatron_snip.collectives import attempt, on_rank_0
from megatron_snip.errors import InfeasiblePlanError, PlanningError, SnipError, UsageError
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.state import Pending

SOLVER_GRACE_S = 10.0
"""Seconds past the solver's own time limit after which training continues without it."""


class PendingSolve:
    """One problem at a time; all ranks call every method together.

    Attributes:
        pending: what is being solved, the same on all ranks; None if nothing is.
    """

    def __init__(
        self, settings: PlanSettings, control: ProcessGroup | None, solver: SolverProcess | None
    ) -> None:
        """Start with nothing to solve; `solver` is None on ranks other than 0."""
        self.pending: Pending | None = None
        self._settings = settings
        self._control = control
        self._solver = solver
        self._submit_error: Exception | None = None

    def submit(self, pending: Pending, plan: PrecisionPlan) -> None:
        """Rank 0 starts to solve; `plan` is the current one."""
        self.pending, self._submit_error = pending, None
        if self._solver is None:
            return
        try:
            self._solver.submit(pending.problem, self._settings, plan, pending.iteration)
        except Exception as error:  # all ranks get it when the plan is due
            self._submit_error = error

    def is_due(self, iteration: int) -> bool:
        """Whether the plan must be applied before `iteration`."""
        return self.pending is not None and iteration >= self.pending.apply_at

    def result(self) -> tuple[PrecisionPlan, float]:
        """Return rank 0's plan and the seconds that training waited for it.

        Raises:
            SnipError: the same on every rank, if there is no plan.
        """
        assert self.pending is not None
        pending, self.pending = self.pending, None
        begin = time.perf_counter()
        try:
            plan = plan_from_rank_0(self._solved, self._control)
        except SnipError as error:
            why = f"no plan from the statistics of iteration {pending.iteration}: {error}"
            raise PlanningError(why) from None
        return plan, time.perf_counter() - begin

    def drop(self) -> None:
        """Forget the problem: it was measured under a plan that was reverted."""
        self.pending = None
        if self._solver is not None:
            with contextlib.suppress(Exception):
                self._solver.result(0.0)

    def close(self) -> None:
        """End the solver's process."""
        if self._solver is not None:
            self._solver.close()

    def _solved(self) -> PrecisionPlan:
        if self._submit_error is not None:
            raise self._submit_error
        assert self._solver is not None, "rank 0 has the solver"
        return self._solver.result(self._settings.time_limit_s + SOLVER_GRACE_S)


def plan_from_rank_0(
    make: Callable[[], PrecisionPlan], control: ProcessGroup | None
) -> PrecisionPlan:
    """All ranks: return the plan that rank 0 makes.

    Args:
        make: called on rank 0 only.
        control: a group of all ranks.

    Raises:
        UsageError: on every rank, if `make` raised one or an InfeasiblePlanError.
        RemoteFailure: on every rank, if it raised anything else, or a rank cannot read the plan.
    """

    def plan_dict() -> dict[str, Any]:
        try:
            return make().to_dict()
        except InfeasiblePlanError as error:
            raise UsageError(str(error), "efficiency_target") from None

    found = on_rank_0("planning", plan_dict, control)
    return attempt("reading the plan", lambda: PrecisionPlan.from_dict(found), control)
