"""PendingSolve: rank 0 gives a problem to the solver's process; later all ranks get the plan.

Training waits for the solver only at the iteration where its plan is due. If anything went wrong on
rank 0 until then (a crash, an invalid plan, no plan in time), all ranks get the error instead.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from megatron_snip.collectives import attempt, broadcast_json
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
            found = from_rank_0(None if self._solver is None else self._solved, self._control)
        except SnipError as error:
            why = f"no plan from the statistics of iteration {pending.iteration}: {error}"
            raise PlanningError(why) from None
        waited_s = time.perf_counter() - begin
        plan = attempt("reading the plan", lambda: PrecisionPlan.from_dict(found), self._control)
        return plan, waited_s

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
        assert self._solver is not None
        return self._solver.result(self._settings.time_limit_s + SOLVER_GRACE_S)


def from_rank_0(
    make: Callable[[], PrecisionPlan] | None, control: ProcessGroup | None
) -> dict[str, Any]:
    """All ranks: return the plan that rank 0 makes, as a plan file's object.

    Args:
        make: on rank 0; None elsewhere.
        control: a group of all ranks.

    Raises:
        UsageError: on every rank, if rank 0 raised one or an InfeasiblePlanError.
        SnipError: on every rank, if rank 0 raised anything else.
    """
    outcome = broadcast_json({} if make is None else _outcome(make), control)
    if "field" in outcome:
        raise UsageError(outcome["error"], outcome["field"])
    if "error" in outcome:
        raise SnipError(outcome["error"])
    plan: dict[str, Any] = outcome["plan"]
    return plan


def _outcome(make: Callable[[], PrecisionPlan]) -> dict[str, Any]:
    """Rank 0: {"plan"}, {"error", "field"} of bad input, or {"error"}, as it is sent."""
    try:
        outcome = {"plan": make().to_dict()}
        json.dumps(outcome, allow_nan=False)  # what cannot be sent is an error here
        return outcome
    except Exception as error:  # whatever it was, all ranks get it
        if isinstance(error, UsageError):
            return {"error": error.message, "field": error.field}
        if isinstance(error, InfeasiblePlanError):
            return {"error": str(error), "field": "efficiency_target"}
        return {"error": f"{type(error).__name__}: {error}"}
