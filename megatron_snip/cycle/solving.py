"""Solving: rank 0 gives a problem to the solver's process, and later all ranks hear the outcome.

Training never waits for the solver but at the step where its plan is due. What went wrong on
rank 0 until then (a crash, nonsense, no answer in time) is told to all ranks in the plan's place.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from megatron_snip.collectives import attempt, broadcast_json
from megatron_snip.config import SnipConfig
from megatron_snip.controller_state import Pending
from megatron_snip.cycle.offer import Offer
from megatron_snip.errors import InfeasiblePlanError, PlanningError, SnipError, UsageError
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess

SOLVER_GRACE_S = 10.0
"""Seconds past the solver's own time limit after which training gives it up."""


class Solving:
    """One problem at a time; all ranks call every method together.

    Attributes:
        config: the settings.
        pending: what is being solved, the same on all ranks; None if nothing is.
    """

    def __init__(
        self,
        config: SnipConfig,
        offer: Offer,
        control: ProcessGroup | None,
        solver: SolverProcess | None,
    ) -> None:
        """Start with nothing to solve.

        Args:
            config: the settings.
            offer: knows the model's linears.
            control: a group of all ranks.
            solver: on rank 0, if plans change in this run; else None.
        """
        self.config = config
        self.pending: Pending | None = None
        self._offer = offer
        self._control = control
        self._solver = solver
        self._unsent: Exception | None = None

    def submit(self, pending: Pending, plan: PrecisionPlan) -> None:
        """Remember what is being solved; rank 0 starts the solver.

        Args:
            pending: the problem.
            plan: in force, for the solver to start from.
        """
        self.pending, self._unsent = pending, None
        if self._solver is None:
            return
        try:
            self._solver.submit(
                pending.problem,
                PlanSettings.from_config(self.config),
                plan,
                pending.step + 1,
            )
        except Exception as error:  # told to all ranks when the outcome is due
            self._unsent = error

    def due(self, step: int) -> bool:
        """Whether the outcome is to be heard before training step `step`."""
        return self.pending is not None and step >= self.pending.apply_at

    def conclude(self) -> tuple[PrecisionPlan, float]:
        """Return rank 0's plan, checked on every rank, and the seconds that training waited.

        Raises:
            PlanningError: the same on every rank, if there is none.
            RemoteFailure: the same on every rank, if one cannot read it.
        """
        assert self.pending is not None
        pending, self.pending = self.pending, None
        begin = time.perf_counter()
        try:
            found = from_leader(None if self._solver is None else self._solved, self._control)
        except SnipError as error:
            why = f"no new plan from the statistics of iteration {pending.step + 1}: {error}"
            raise PlanningError(why) from None
        waited_s = time.perf_counter() - begin
        plan = attempt(
            "reading the new plan",
            lambda: self._offer.checked(PrecisionPlan.from_dict(found)),
            self._control,
        )
        return plan, waited_s

    def drop(self) -> None:
        """Forget what is being solved: it was measured in bad company."""
        self.pending = None
        if self._solver is not None:
            with contextlib.suppress(Exception):
                self._solver.result(0.0)

    def close(self) -> None:
        """End the solver's process."""
        if self._solver is not None:
            self._solver.close()

    def _solved(self) -> PrecisionPlan:
        """Rank 0: wait for the solver, at most its time limit."""
        if self._unsent is not None:
            raise self._unsent
        assert self._solver is not None
        return self._solver.result(self.config.time_limit_s + SOLVER_GRACE_S)


def from_leader(
    make: Callable[[], PrecisionPlan] | None, control: ProcessGroup | None
) -> dict[str, Any]:
    """All ranks: return the plan that rank 0 makes, as a plan file's object.

    Args:
        make: on rank 0; None elsewhere.
        control: a group of all ranks.

    Raises:
        UsageError: on every rank, if rank 0 met one, or no plan satisfies the rules.
        SnipError: on every rank, if anything else went wrong.
    """
    outcome = broadcast_json({} if make is None else _outcome(make), control)
    if "error" in outcome:
        raise (UsageError if outcome["usage"] else SnipError)(outcome["error"])
    plan: dict[str, Any] = outcome["plan"]
    return plan


def _outcome(make: Callable[[], PrecisionPlan]) -> dict[str, Any]:
    """Rank 0: {"plan"} or {"error", "usage"}, as all ranks will hear it."""
    try:
        outcome = {"plan": make().to_dict()}
        json.dumps(outcome, allow_nan=False)  # what cannot be sent is an error here and now
        return outcome
    except Exception as error:  # whatever it was, all ranks hear of it
        if isinstance(error, UsageError | InfeasiblePlanError):
            return {"error": str(error), "usage": True}
        return {"error": f"{type(error).__name__}: {error}", "usage": False}
