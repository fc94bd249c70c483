"""PlanGuard: what becomes of a plan that the loss guard does not trust.

    a plan changes     the one before becomes the good plan, unless it was itself under suspicion
    a watched step     runs under the new plan; its loss and gradients are looked at before the
                       optimizer sees them. Calm: that was all. Else everything the attempt left
                       behind is undone, the step is made again under the fallback, and that one
                       counts; so a NaN never reaches the weights
    the plan goes      if the loss was NaN, if the second try was much better, or if losses stay
                       high (see loss_guard.py). Then the fallback stays, the plan is refused from
                       now on, and the next step measures anew
    the plan stays     otherwise: the data or the learning rate made the loss jump

The fallback is the last good plan; where that is the one in force, it is BF16 throughout, but for
pinned linears; where that is in force, there is nothing left to do and the guard stands down.

Between plan changes nothing is waited for: the loss of a step is told to all ranks after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.controller_state import GuardState
from megatron_snip.linears.step_loss import StepLoss, finite_gradients
from megatron_snip.linears.training_state import TrainingStateSnapshot
from megatron_snip.linears.training_step import TrainingStep, tolerating_non_finite
from megatron_snip.loss_guard import GuardSettings, LossGuard, Verdict
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.topology import Topology

MAX_REFUSED = 16
"""Refused plans that are remembered."""

Run = Callable[[PrecisionPlan], list[dict[str, Any]]]
"""Makes the step's forward-backward under a plan; all ranks."""


@dataclass(frozen=True)
class Judged:
    """How a watched step went.

    Attributes:
        results: what the schedule returned for the try that counts.
        fallback: the plan to go on with, or None to keep the one in force.
        message: what happened, one line; None where the step was calm.
    """

    results: list[dict[str, Any]]
    fallback: PrecisionPlan | None = None
    message: str | None = None


class PlanGuard:
    """Watches the plans of one run; all ranks call every method together.

    Attributes:
        refresh_at: step at which a refresh is wanted because a plan went, or None.
    """

    def __init__(self, config: SnipConfig, topology: Topology, state: GuardState | None) -> None:
        """Start, or go on.

        Args:
            config: the settings.
            topology: this rank's place; its control group carries losses and verdicts.
            state: of the run that was stopped.
        """
        self._settings = GuardSettings(
            steps=config.guard_steps,
            sigmas=config.guard_sigmas,
            rise=config.guard_rise,
            patience=config.guard_patience,
        )
        self._topology = topology
        self._loss = LossGuard() if state is None else state.loss
        self._good = None if state is None else state.good
        self._refused = () if state is None else state.refused
        self._falls = 0 if state is None else state.falls
        self.refresh_at = None if state is None else state.refresh_at
        self._unheard: StepLoss | None = None

    def state(self) -> GuardState:
        """Return what a checkpoint keeps; the same on all ranks."""
        return GuardState(self._loss, self._good, self._refused, self._falls, self.refresh_at)

    @property
    def watching(self) -> bool:
        """Whether the plan in force has yet to prove itself."""
        return self._loss.watch is not None

    def refuses(self, plan: PrecisionPlan) -> bool:
        """Whether this plan went before."""
        return plan.digest in self._refused

    def changed(self, old: PrecisionPlan) -> None:
        """Another plan than `old` is in force from the next step on."""
        watch = self._loss.watch
        if watch is None or watch.strikes == 0:
            self._good = old
        self._loss = self._loss.changed(self._settings)

    def noted(self, results: list[dict[str, Any]]) -> None:
        """A step has run unwatched; its loss is heard later."""
        self._unheard = StepLoss(results, self._topology)

    def hear(self) -> None:
        """Hear the loss of the last unwatched step, if it was not heard yet."""
        unheard, self._unheard = self._unheard, None
        if unheard is not None:
            self._heard(unheard.value())

    def watch(
        self,
        training: TrainingStep,
        plan: PrecisionPlan,
        safe: PrecisionPlan,
        run: Run,
        clear: Callable[[], None],
    ) -> Judged:
        """Make a watched step; see the file's description.

        Args:
            training: the step's forward-backward call.
            plan: in force.
            safe: BF16 but for the pins.
            run: makes the step's forward-backward under a plan.
            clear: empties the gradients, as before a step.
        """
        before = TrainingStateSnapshot(training.chunks)
        with tolerating_non_finite():
            results = run(plan)
        loss = self._measured(results, training)
        if loss is None:
            return Judged(results)
        verdict = self._loss.verdict(loss, self._settings)
        if verdict is Verdict.CALM:
            self._heard(loss)
            return Judged(results)
        fallback = self._fallback(plan, safe)
        before.restore()
        clear()
        results = run(plan if fallback is None else fallback)
        told = f"loss {loss:.4g} under the {plan.policy} plan of step {plan.step}"
        if fallback is None:  # the step was made again so that Megatron sees what there is to see
            self._loss = self._loss.stood_down()
            return Judged(results, None, f"{told}, and there is nothing to fall back to")
        second = self._measured(results, training)
        second = math.nan if second is None else second
        told += f", {second:.4g} under the {fallback.policy} plan of step {fallback.step}"
        if verdict is Verdict.SUSPECT and not self._loss.blames(loss, second):
            self._heard(loss)
            return Judged(results, None, f"{told}: the plan stays")
        return Judged(results, fallback, told)

    def fell(self, plan: PrecisionPlan, fallback: PrecisionPlan, step: int) -> None:
        """`plan` went in step `step`, and `fallback` is in force."""
        self._refused = (*self._refused, plan.digest)[-MAX_REFUSED:]
        self._falls += 1
        # One measurement at once; if its plan goes as well, the next waits for its turn.
        self.refresh_at = step + 1 if self._falls == 1 else None
        self._good = fallback
        self._loss = self._loss.changed(self._settings)

    def _fallback(self, plan: PrecisionPlan, safe: PrecisionPlan) -> PrecisionPlan | None:
        for candidate in (self._good, safe):
            if candidate is not None and candidate.digest != plan.digest:
                return candidate
        return None

    def _measured(self, results: list[dict[str, Any]], training: TrainingStep) -> float | None:
        """The step's loss; NaN where a gradient is not finite, None without a report."""
        loss = StepLoss(results, self._topology).value()
        if loss is None or finite_gradients(training.chunks, self._topology):
            return loss
        return math.nan

    def _heard(self, loss: float | None) -> None:
        if loss is None:
            return
        watched = self.watching
        self._loss = self._loss.heard(loss)
        if watched and not self.watching:
            self._falls = 0  # the plan has proven itself
