"""The guard: reverts a plan that makes the loss jump or NaN.

The guard judges the first 50 iterations after a plan change. From the last calm losses l_i before
the change (at most 16) it computes

    level    the median of the last 8 (the largest, while there are fewer than 8)
    noise    1.4826 / sqrt(2) * median |d_i - median d|,  d_i = l_i - l_(i-1)
             (robust; a slope does not enter)
    limit    level + max(sigmas * noise, 0.2 * |level|)

An iteration whose loss is finite and at most the limit is calm. Otherwise everything that the
attempt changed is restored, and the iteration runs again under the fallback plan, so a NaN that a
plan causes never reaches the weights. The plan is reverted if its loss was not finite and the
second one is, if the second run undoes more than half of the rise, or if losses stayed above the
limit for 10 iterations. Then the fallback stays, the plan is refused from now on, and the next
iteration measures again. Otherwise the data or the learning rate caused the loss, and the plan
stays; a loss that is NaN under both plans is left to Megatron's own check.

The fallback is the last good plan; if that is the current one, BF16 except for pinned linears; if
that is the current one too, the guard stops watching.

Outside those iterations the sum of the loss starts after the backward, and all ranks read it at the
end of the iteration.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_snip.linears.step_loss import StepLoss, finite_gradients
from megatron_snip.linears.training_state import TrainingStateSnapshot
from megatron_snip.linears.training_step import TrainingStep, tolerating_non_finite
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.topology import Topology

WATCHED_ITERATIONS = 50
PATIENCE = 10
"""Iterations above the limit, with no return to half of the rise, after which the plan is reverted
whatever a second run shows: the plan may have damaged the weights."""

MIN_RISE = 0.2
"""Smallest rise that counts, as a share of the level."""

MAX_REFUSED = 16
"""Refused plans that are remembered."""

_MAX_LOSSES = 16
_MEDIAN_LOSSES = 8
"""Losses from which the median is a better level than the largest; more would lag behind a loss
that falls fast."""

_NORMAL = 1.4826 / math.sqrt(2.0)
"""Median |difference of two draws| to standard deviation, for a normal distribution."""

Results = list[dict[str, Any]]
"""What Megatron's forward-backward function returns."""


@dataclass(frozen=True)
class Watch:
    """A plan that is being judged.

    Attributes:
        left: iterations still to be judged.
        level: the loss at the plan change.
        limit: losses above it are suspect.
        strikes: suspect iterations since the loss was last below half of the rise.
    """

    left: int
    level: float
    limit: float
    strikes: int = 0


@dataclass(frozen=True)
class LossMonitor:
    """The losses so far, and the watch on the current plan; ranks that add equal losses agree.

    Attributes:
        recent: the last calm losses, oldest first.
        watch: None if the current plan is not being judged.
    """

    recent: tuple[float, ...] = ()
    watch: Watch | None = None

    def after_plan_change(self, sigmas: float) -> LossMonitor:
        """Return the monitor that judges a new plan; without losses before, nothing is judged."""
        if not self.recent:
            return replace(self, watch=None)
        many = len(self.recent) >= _MEDIAN_LOSSES
        level = statistics.median(self.recent[-_MEDIAN_LOSSES:]) if many else max(self.recent)
        limit = level + max(sigmas * _noise(self.recent), MIN_RISE * abs(level))
        return replace(self, watch=Watch(WATCHED_ITERATIONS, level, limit))

    def is_calm(self, loss: float) -> bool:
        """Whether a loss raises no suspicion."""
        return self.watch is None or (math.isfinite(loss) and loss <= self.watch.limit)

    def blames_plan(self, loss: float, second: float) -> bool:
        """Return whether the plan is the reason for a suspect loss.

        Args:
            loss: under the plan.
            second: of the same iteration and weights under the fallback.
        """
        assert self.watch is not None, "only a watched iteration runs twice"
        if not math.isfinite(loss):
            return math.isfinite(second)  # NaN under both is not the plan's doing
        if self.watch.strikes + 1 >= PATIENCE:
            return True
        return loss - second > 0.5 * (loss - self.watch.level)

    def add(self, loss: float) -> LossMonitor:
        """Return the monitor after an iteration with this loss."""
        finite, watch = math.isfinite(loss), self.watch
        if watch is None:
            # After a NaN there is no level to compare with; no plan change caused it.
            return LossMonitor((*self.recent, loss)[-_MAX_LOSSES:] if finite else ())
        strikes = watch.strikes
        if not finite or loss > watch.limit:
            strikes += 1
        elif loss <= (watch.level + watch.limit) / 2:
            strikes = 0
        recent = (*self.recent, loss)[-_MAX_LOSSES:] if strikes == 0 else self.recent
        left = watch.left - 1
        if left <= 0 and strikes == 0:  # a series of high losses is watched to its end
            return LossMonitor(recent)
        return LossMonitor(recent, replace(watch, left=left, strikes=strikes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        watch = None
        if self.watch is not None:
            w = self.watch
            watch = {"left": w.left, "level": w.level, "bar": w.limit, "strikes": w.strikes}
        return {"recent": list(self.recent), "watch": watch}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LossMonitor:
        """Build from what `to_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: if an entry is missing, or is not a finite number.
        """
        w = value["watch"]
        watch = None
        if w is not None:
            watch = Watch(int(w["left"]), _finite(w["level"]), _finite(w["bar"]), int(w["strikes"]))
        return cls(tuple(_finite(loss) for loss in value["recent"])[-_MAX_LOSSES:], watch)


@dataclass(frozen=True)
class GuardState:
    """What a checkpoint keeps of the guard.

    Attributes:
        loss: the losses and the watch.
        good: the last good plan, or None before the first change.
        refused: digests of plans that were reverted.
        num_reverted: plans reverted since one was last judged good.
        refresh_at: iteration at which a refresh is wanted because a plan was reverted, or None.
    """

    loss: LossMonitor = LossMonitor()
    good: PrecisionPlan | None = None
    refused: tuple[str, ...] = ()
    num_reverted: int = 0
    refresh_at: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "loss": self.loss.to_dict(),
            "good": None if self.good is None else self.good.to_dict(),
            "refused": list(self.refused),
            "falls": self.num_reverted,
            "refresh_at": self.refresh_at,
        }


@dataclass(frozen=True)
class Judgement:
    """How a watched iteration ended.

    Attributes:
        results: of the run that counts.
        fallback: the plan to continue with, or None to keep the current one.
        message: what happened, one line; None if the iteration was calm.
    """

    results: Results
    fallback: PrecisionPlan | None = None
    message: str | None = None


class Guard:
    """Judges the plans of a run; all ranks call every method together.

    Attributes:
        state: what a checkpoint keeps; the same on all ranks.
    """

    def __init__(self, sigmas: float, topology: Topology, state: GuardState | None = None) -> None:
        """Start, or continue from `state`; losses travel through the topology's control group."""
        self.state = GuardState() if state is None else state
        self._sigmas = sigmas
        self._topology = topology
        self._pending_loss: StepLoss | None = None

    @property
    def is_watching(self) -> bool:
        """Whether the current plan is being judged."""
        return self.state.loss.watch is not None

    def refuses(self, plan: PrecisionPlan) -> bool:
        """Whether this plan was reverted before."""
        return plan.digest in self.state.refused

    def plan_changed(self, old: PrecisionPlan) -> None:
        """Judge a plan that replaces `old` from the next iteration on."""
        watch = self.state.loss.watch
        good = old if watch is None or watch.strikes == 0 else self.state.good
        loss = self.state.loss.after_plan_change(self._sigmas)
        self.state = replace(self.state, good=good, loss=loss)

    def start_loss(self, results: Results) -> None:
        """Begin to collect the loss of an unwatched iteration; `finish_loss` reads it."""
        self._pending_loss = StepLoss(results, self._topology)

    def finish_loss(self) -> None:
        """Add the loss that `start_loss` began to collect, if there is one."""
        pending, self._pending_loss = self._pending_loss, None
        if pending is not None:
            self._add(pending.value())

    def run_watched(
        self,
        training: TrainingStep,
        plan: PrecisionPlan,
        safe: PrecisionPlan,
        run: Callable[[PrecisionPlan], Results],
        clear: Callable[[], None],
    ) -> Judgement:
        """Run a watched iteration, twice if need be.

        Args:
            training: the iteration's forward-backward call.
            plan: the current plan.
            safe: BF16 except for pinned linears.
            run: runs the iteration's forward-backward under a plan.
            clear: zeroes the gradients.
        """
        snapshot = TrainingStateSnapshot(training.chunks)
        with tolerating_non_finite():
            results = run(plan)
        loss = self._measure_loss(results, training)
        if loss is None or self.state.loss.is_calm(loss):
            self._add(loss)
            return Judgement(results)
        fallback = self._fallback(plan, safe)
        snapshot.restore()
        clear()
        results = run(plan if fallback is None else fallback)
        text = f"loss {loss:.4g} under {plan.label}"
        if fallback is None:  # it ran again so that Megatron's own checks see the loss
            self.state = replace(self.state, loss=replace(self.state.loss, watch=None))
            return Judgement(results, None, f"{text}; no other plan to fall back to")
        measured = self._measure_loss(results, training)
        second = math.nan if measured is None else measured
        text += f", {second:.4g} under {fallback.label}"
        if not self.state.loss.blames_plan(loss, second):
            if math.isfinite(loss) and not math.isfinite(second):
                snapshot.restore()
                clear()
                results = run(plan)
            self._add(loss)
            return Judgement(results, None, f"{text}; keeping the plan")
        return Judgement(results, fallback, text)

    def reverted(self, plan: PrecisionPlan, fallback: PrecisionPlan, iteration: int) -> None:
        """Record that `fallback` replaced `plan` in `iteration`."""
        num_reverted = self.state.num_reverted + 1
        self.state = GuardState(
            loss=self.state.loss.after_plan_change(self._sigmas),
            good=fallback,
            refused=(*self.state.refused, plan.digest)[-MAX_REFUSED:],
            num_reverted=num_reverted,
            # One refresh at once. If its plan is reverted too, the next one waits for its turn.
            refresh_at=iteration + 1 if num_reverted == 1 else None,
        )

    def _fallback(self, plan: PrecisionPlan, safe: PrecisionPlan) -> PrecisionPlan | None:
        candidates = [p for p in (self.state.good, safe) if p is not None]
        return next((p for p in candidates if p.digest != plan.digest), None)

    def _measure_loss(self, results: Results, training: TrainingStep) -> float | None:
        """The loss; NaN where a gradient is not finite, None if the schedule reports no loss."""
        loss = StepLoss(results, self._topology).value()
        if loss is None or finite_gradients(training.chunks, self._topology):
            return loss
        return math.nan

    def _add(self, loss: float | None) -> None:
        if loss is None:
            return
        was_watching = self.is_watching
        self.state = replace(self.state, loss=self.state.loss.add(loss))
        if was_watching and not self.is_watching:
            self.state = replace(self.state, num_reverted=0)  # the plan was judged good


def _noise(losses: Sequence[float]) -> float:
    changes = [b - a for a, b in itertools.pairwise(losses)]
    if not changes:
        return 0.0
    slope = statistics.median(changes)
    return _NORMAL * statistics.median(abs(change - slope) for change in changes)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
