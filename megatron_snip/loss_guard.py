"""LossGuard: does the loss say that a plan has broken training? Losses in, a verdict out.

It judges the steps after a plan change and no others. When a plan changes, it notes where the loss
stood, from the calm losses l_i before (at most 16):

    level    the median of the last 8 (the largest, while there are fewer than 8)
    spread   1.4826 / sqrt(2) * median |d_i - median d|,  d_i = l_i - l_(i-1)
             (robust; a slope does not enter)
    bar      level + max(sigmas * spread, rise * |level|)

    CALM      the loss is finite and at most the bar
    SUSPECT   it is above the bar: the caller makes the step again with the plan to fall back to,
              and `blames` says whether the plan, and not the data or the weights, is the reason
    LASTING   it has been above the bar for `patience` steps, and in none between was it halfway
              back to the level: whatever a second try says, the plan may have spoilt the weights
    BROKEN    it is NaN or infinite

After `steps` steps the plan has proven itself. A guard is an immutable value and holds plain
numbers, so it travels in checkpoints, and ranks that hear the same losses reach the same verdict.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

_KEPT = 16
_ENOUGH = 8
"""Losses from which the median is a better level than the largest; more would lag behind a loss
that falls fast."""

_NORMAL = 1.4826 / math.sqrt(2.0)
"""Median |difference of two draws| to standard deviation, for a normal distribution."""

_SHARE = 0.5
"""Share of the rise above the level that a second try must undo to blame the plan."""


class Verdict(StrEnum):
    """What a loss says of the plan; see the file's description."""

    CALM = "calm"
    SUSPECT = "suspect"
    LASTING = "lasting"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """When a loss is a spike.

    Attributes:
        steps: training steps after a plan change that are judged, at least 1.
        sigmas: least rise above the level, in spreads.
        rise: least rise above the level, as a share of it.
        patience: steps above the bar, without a return between, that need no second try; >= 1.
    """

    steps: int
    sigmas: float
    rise: float
    patience: int


@dataclass(frozen=True)
class Watch:
    """A plan that has yet to prove itself.

    Attributes:
        left: steps still to be judged.
        level: the loss at the change.
        bar: losses above it are suspect.
        strikes: steps that were suspect since the loss was last halfway back.
    """

    left: int
    level: float
    bar: float
    strikes: int = 0


@dataclass(frozen=True)
class LossGuard:
    """What the guard knows between two steps.

    Attributes:
        recent: the last calm losses, oldest first.
        watch: of the plan in force, or None once it has proven itself.
    """

    recent: tuple[float, ...] = ()
    watch: Watch | None = None

    def changed(self, settings: GuardSettings) -> LossGuard:
        """Return the guard after a plan change; without finite losses before, nothing is judged."""
        if not self.recent:
            return replace(self, watch=None)
        level, spread = _level(self.recent), _spread(self.recent)
        bar = level + max(settings.sigmas * spread, settings.rise * abs(level))
        return replace(self, watch=Watch(settings.steps, level, bar))

    def stood_down(self) -> LossGuard:
        """Return the guard that watches nothing until the next change."""
        return replace(self, watch=None)

    def verdict(self, loss: float, settings: GuardSettings) -> Verdict:
        """Judge the loss of the step that was just made."""
        if self.watch is None:
            return Verdict.CALM
        if not math.isfinite(loss):
            return Verdict.BROKEN
        if loss <= self.watch.bar:
            return Verdict.CALM
        lasting = self.watch.strikes + 1 >= settings.patience
        return Verdict.LASTING if lasting else Verdict.SUSPECT

    def blames(self, loss: float, second: float) -> bool:
        """Whether the plan is to blame for a suspect loss.

        Args:
            loss: under the plan.
            second: of the same step and weights under the plan to fall back to.
        """
        assert self.watch is not None, "only a watched step is tried twice"
        return loss - second > _SHARE * (loss - self.watch.level)

    def heard(self, loss: float) -> LossGuard:
        """Return the guard after a step with this loss."""
        finite = math.isfinite(loss)
        watch = self.watch
        if watch is None:
            # After a NaN there is no level to compare with; it was no plan's change.
            recent = (*self.recent, loss)[-_KEPT:] if finite else ()
            return LossGuard(recent, None)
        strikes = watch.strikes
        if not finite or loss > watch.bar:
            strikes += 1
        elif loss <= (watch.level + watch.bar) / 2:
            strikes = 0
        recent = (*self.recent, loss)[-_KEPT:] if strikes == 0 else self.recent
        left = watch.left - 1
        if left <= 0 and strikes == 0:  # a run of high losses is followed to its end
            return LossGuard(recent, None)
        return LossGuard(recent, replace(watch, left=left, strikes=strikes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        watch = None
        if self.watch is not None:
            w = self.watch
            watch = {"left": w.left, "level": w.level, "bar": w.bar, "strikes": w.strikes}
        return {"recent": list(self.recent), "watch": watch}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LossGuard:
        """Build from what `to_dict` returned.

        Raises:
            KeyError: if an entry is missing.
            TypeError: if an entry is of another type.
            ValueError: if an entry is not a finite number.
        """
        w = value["watch"]
        watch = None
        if w is not None:
            watch = Watch(int(w["left"]), _finite(w["level"]), _finite(w["bar"]), int(w["strikes"]))
        return cls(tuple(_finite(loss) for loss in value["recent"])[-_KEPT:], watch)


def _level(losses: Sequence[float]) -> float:
    return max(losses) if len(losses) < _ENOUGH else statistics.median(losses[-_ENOUGH:])


def _spread(losses: Sequence[float]) -> float:
    steps = [b - a for a, b in itertools.pairwise(losses)]
    if not steps:
        return 0.0
    slope = statistics.median(steps)
    return _NORMAL * statistics.median(abs(step - slope) for step in steps)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
