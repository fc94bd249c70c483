"""The guard: reverts a plan that makes the loss jump or NaN.

It judges the first iterations after a plan change (loss_monitor.py: how many, and what a spike is).
At a spike everything that the attempt changed is restored, and the iteration runs again under the
fallback plan. So no NaN of a judged iteration reaches the weights if the plan caused it. The losses
under the two plans decide:

    the plan is to blame      it is reverted: the fallback stays, and the plan is refused if it
                              comes again
    the plan is not to blame  the data or the learning rate caused the loss, and the plan stays; a
                              loss that is NaN under both is left to Megatron's own check

The fallback is the first of these that differs from the current plan: `GuardState.first_fallback`,
which is usually the plan before the change; what the job itself runs, with the pins.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from megatron_snip.files import OwnSchema
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.run.loss_monitor import LossMonitor, Record
from megatron_snip.run.step import (
    Results,
    StepLoss,
    TrainingStep,
    gradients_are_finite,
    prepare_next_pass,
    tolerating_non_finite,
)

MAX_REFUSED = 16
"""How many refused plans are remembered, the latest ones."""


class GuardState(Record):
    """What the guard knows; a record that its methods return changed.

    Attributes:
        loss: the losses so far, and what the current plan is judged by.
        first_fallback: the plan that the guard falls back to, unless it equals the current plan, as
            it does after a revert. Usually it is the plan before the last change, judged to the end
            or not. None: there is no earlier plan. Earlier checkpoints call it `good`.
        refused: digests of the last MAX_REFUSED plans that were reverted.
        num_reverted: plans reverted since one was last judged good.
        refresh_at: iteration from which a refresh is wanted because a plan was reverted, or None.
    """

    loss: LossMonitor = LossMonitor()
    first_fallback: Annotated[PrecisionPlan, OwnSchema()] | None = Field(
        default=None, validation_alias=AliasChoices("first_fallback", "good")
    )
    refused: tuple[str, ...] = ()
    num_reverted: int = 0
    refresh_at: int | None = None

    @property
    def is_judging(self) -> bool:
        """Whether the current plan is being judged."""
        return self.loss.watch is not None

    def after_plan_change(self, fallback: PrecisionPlan | None, sigmas: float) -> "GuardState":
        """Return the state that judges a new plan from the coming iteration on.

        Args:
            fallback: the plan before the change, or None. It becomes `first_fallback`, unless the
                change comes during a series of spikes.
            sigmas: smallest jump of the loss that counts (`--snip-guard-sigmas`).
        """
        watch = self.loss.watch
        is_in_series = watch is not None and watch.num_spikes > 0
        if is_in_series:  # the plan before the change is suspect itself
            fallback = self.first_fallback
        loss = self.loss.after_plan_change(sigmas)
        return self.model_copy(update={"first_fallback": fallback, "loss": loss})

    def after_revert(
        self, plan: PrecisionPlan, fallback: PrecisionPlan, iteration: int, sigmas: float
    ) -> "GuardState":
        """Return the state after `fallback` replaced `plan` in `iteration`."""
        num_reverted = self.num_reverted + 1
        return GuardState(
            loss=self.loss.after_plan_change(sigmas),
            first_fallback=fallback,
            refused=(*self.refused, plan.digest)[-MAX_REFUSED:],
            num_reverted=num_reverted,
            # One refresh at once. If its plan is reverted too, the next refresh waits for its turn:
            # a run whose plans all fail must not measure in every iteration.
            refresh_at=iteration + 1 if num_reverted == 1 else None,
        )

    def after_loss(self, loss: float | None) -> "GuardState":
        """Return the state after an iteration's loss; the current plan may be judged good by it."""
        if loss is None:
            return self
        after = self.model_copy(update={"loss": self.loss.add(loss)})
        if self.is_judging and not after.is_judging:  # judged good: the next revert is a first one
            return after.model_copy(update={"num_reverted": 0})
        return after

    def without_watch(self) -> "GuardState":
        """Return the state that judges nothing until the next plan change."""
        return self.model_copy(update={"loss": LossMonitor(recent=self.loss.recent)})


@dataclass(frozen=True)
class Outcome:
    """How an iteration's forward-backward ended.

    Attributes:
        results: what Megatron's function returned in the attempt that counts.
        guard: what the guard knows now; None if it is off.
        num_runs: how often it ran; more than once only after a spike.
        was_judged: whether the plan was judged by this iteration's loss.
        fallback: the plan to continue with, or None to keep the current one.
        message: what happened, one line; None without a spike.
        loss: the loss of an iteration that was not judged, on its way from the device; else None.
    """

    results: Results
    guard: GuardState | None
    num_runs: int = 1
    was_judged: bool = False
    fallback: PrecisionPlan | None = None
    message: str | None = None
    loss: StepLoss | None = None


class Guard:
    """Runs the iterations and judges the plans; all ranks call `run` together."""

    def __init__(
        self,
        model: PlannedModel,
        optimizer: Any,
        job_fallback: Callable[[PrecisionPlan, int], PrecisionPlan],
    ) -> None:
        """Make a guard of a model.

        Args:
            model: the planned linears.
            optimizer: Megatron's, whose gradients are zeroed before a second run.
            job_fallback: given the current plan and the iteration, returns what the job itself
                runs, with the pins. That is the fallback if `first_fallback` is None or the current
                plan.
        """
        self._model = model
        self._topology = model.runtime.topology
        self._optimizer = optimizer
        self._job_fallback = job_fallback

    def run(
        self, iteration: int, step: TrainingStep, plan: PrecisionPlan, guard: GuardState | None
    ) -> Outcome:
        """Run an iteration's forward-backward under the current plan, again if need be.

        Args:
            iteration: the iteration that runs.
            step: the iteration's forward-backward call.
            plan: the current plan, which is applied.
            guard: what the guard knows; None runs the iteration only.
        """
        if guard is not None and guard.is_judging:
            return self._run_judged(iteration, step, plan, guard)
        results = self._run(iteration, step)
        # Nothing waits for this loss now: the controller reads it at the end of the iteration.
        loss = None if guard is None else StepLoss(results, self._topology)
        return Outcome(results, guard, loss=loss)

    def _run(self, iteration: int, step: TrainingStep) -> Results:
        """Run the forward-backward under the plan that is applied."""
        with self._model.runtime.training_pass(iteration):
            return step.run()

    def _run_judged(
        self, iteration: int, step: TrainingStep, plan: PrecisionPlan, guard: GuardState
    ) -> Outcome:
        """Run an iteration and judge its loss; after a spike run it again under the fallback."""
        snapshot = TrainingStateSnapshot(step.chunks)

        def run_again(under: PrecisionPlan) -> Results:
            snapshot.restore()
            prepare_next_pass(step.chunks, self._optimizer)
            self._model.apply(under.linears)
            # After `apply`, which decides which exact weights are missing.
            self._model.gather_weights(self._optimizer)
            return self._run(iteration, step)

        # Megatron would end the job at a NaN that the fallback may not have.
        with tolerating_non_finite():
            results = self._run(iteration, step)
        loss = self._measure_loss(results, step)
        if loss is None or not guard.loss.is_spike(loss):
            return Outcome(results, guard.after_loss(loss), was_judged=True)

        text = f"loss {loss:.4g} under {plan.label}"
        fallback = self._fallback(plan, iteration, guard)
        if fallback is None:  # every further spike would end here too: judge no more
            num_runs = 1
            if not math.isfinite(loss):
                # Megatron's own checks did not see the NaN (`tolerating_non_finite`). Now they do.
                results = run_again(plan)
                num_runs = 2
            message = f"{text}; no other plan to fall back to"
            return Outcome(
                results, guard.without_watch(), num_runs, was_judged=True, message=message
            )

        # A NaN of the fallback must not end the job if the plan's loss was finite: the plan runs
        # again below. If both are NaN, Megatron's own checks must see it.
        tolerating = tolerating_non_finite() if math.isfinite(loss) else nullcontext()
        with tolerating:
            results = run_again(fallback)
        measured = self._measure_loss(results, step)
        # None is a report that a rank could not read: no reason to blame the plan.
        fallback_loss = math.nan if measured is None else measured
        text += f", {fallback_loss:.4g} under {fallback.label}"
        if guard.loss.blames_plan(loss, fallback_loss):
            return Outcome(
                results, guard, num_runs=2, was_judged=True, fallback=fallback, message=text
            )

        # The plan stays. The gradients are those of the fallback's run. This one update uses them,
        # which saves a third run. Only if they are not finite, and the plan's were, the plan runs
        # again.
        num_runs = 2
        if math.isfinite(loss) and not math.isfinite(fallback_loss):
            results = run_again(plan)
            num_runs = 3
        self._model.apply(plan.linears)
        message = f"{text}; keeping the plan"
        return Outcome(results, guard.after_loss(loss), num_runs, was_judged=True, message=message)

    def _fallback(
        self, plan: PrecisionPlan, iteration: int, guard: GuardState
    ) -> PrecisionPlan | None:
        """Return what replaces the current plan after a spike; None if nothing else is left."""
        for other in (guard.first_fallback, self._job_fallback(plan, iteration)):
            if other is not None and other.digest != plan.digest:
                return other
        return None

    def _measure_loss(self, results: Results, step: TrainingStep) -> float | None:
        """All ranks: read the loss of a run.

        Returns:
            NaN if a gradient is not finite; None if the step reports no loss.
        """
        loss = StepLoss(results, self._topology)
        # A loss can be finite while a gradient overflows, which would reach the weights.
        return loss.read_judged(gradients_are_finite(step.chunks))
