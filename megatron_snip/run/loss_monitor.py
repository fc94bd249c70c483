"""The judgement of losses after a plan change: which loss is a spike, and whose fault it is.

A new plan is judged for 50 iterations, and in a series of spikes for up to 50 more. From the last
losses l_i before the change that were no spikes (at most 16) come

    level    the median of the last 8 (the largest, while there are fewer than 8)
    noise    1.4826 / sqrt(2) * median |d_i - median d|,  d_i = l_i - l_(i-1)
             (robust; a slope does not enter)
    limit    level + max(sigmas * noise, 0.2 * |level|)

A loss above the limit, or one that is not finite, is a spike. A series of spikes ends with the
first loss of at most (level + limit) / 2. After a spike the iteration runs again, from the same
weights, under another plan. The new plan is to blame

    if its loss was not finite and that of the second run is,
    if the second run lowers the loss by more than half of (loss - level),
    or at the tenth spike of a series.

Records of numbers only: no model, no ranks.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

WATCHED_ITERATIONS = 50
"""Iterations after a plan change that are judged."""

PATIENCE = 10
"""The spike of a series at which the plan is reverted whatever the second run shows, if both losses
are finite: the plan may have damaged the weights."""

MIN_RISE = 0.2
"""Smallest rise that counts, as a share of the level."""

MAX_LOSS = 1e150
"""Largest loss that counts: differences of losses must stay far from a double's overflow."""

_Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]

_MAX_LOSSES = 16
_MEDIAN_LOSSES = 8
"""Losses from which the median is a better level than the largest; more would lag behind a loss
that falls fast."""

_NORMAL = 1.4826 / math.sqrt(2.0)
"""Median |difference of two draws| to standard deviation, for a normal distribution."""


class Record(BaseModel):
    """Base of the records that a checkpoint keeps of the guard; all numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Watch(Record):
    """A plan that is being judged.

    Attributes:
        left: iterations still to be judged; 0 or less in a series of spikes that lasts longer.
        level: the level of the loss before the plan change.
        limit: losses above it are spikes.
        num_spikes: spikes in the series that has not ended; 0 outside a series.
    """

    left: int
    level: float
    limit: float
    num_spikes: int = 0


class LossMonitor(Record):
    """The losses so far, and the watch on the current plan; the same on all ranks.

    Attributes:
        recent: the last losses that were no spikes, oldest first.
        watch: None if the current plan is not being judged.
    """

    recent: tuple[_Loss, ...] = ()
    watch: Watch | None = None

    def after_plan_change(self, sigmas: float) -> "LossMonitor":
        """Return the monitor that judges a new plan; without losses before, nothing is judged."""
        if not self.recent:
            return LossMonitor()
        if len(self.recent) >= _MEDIAN_LOSSES:
            level = statistics.median(self.recent[-_MEDIAN_LOSSES:])
        else:  # too few for a median: the largest, so that there is no false alarm
            level = max(self.recent)
        limit = level + max(sigmas * _noise(self.recent), MIN_RISE * abs(level))
        limit = min(limit, sys.float_info.max)  # a record holds finite numbers only
        watch = Watch(left=WATCHED_ITERATIONS, level=level, limit=limit)
        return self.model_copy(update={"watch": watch})

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is not finite or above the limit; False if no plan is being judged."""
        if self.watch is None:
            return False
        return not math.isfinite(loss) or loss > self.watch.limit

    def blames_plan(self, loss: float, second: float) -> bool:
        """Return whether the plan is the reason for a spike.

        Args:
            loss: the iteration's loss under the plan.
            second: the loss of the same iteration and weights under the fallback.
        """
        assert self.watch is not None, "only a watched iteration runs twice"
        if not math.isfinite(loss):
            return math.isfinite(second)  # NaN under both is not caused by the plan
        if not math.isfinite(second):
            return False  # the fallback is worse
        if self.watch.num_spikes + 1 >= PATIENCE:
            return True
        return loss - second > 0.5 * (loss - self.watch.level)

    def add(self, loss: float) -> "LossMonitor":
        """Return the monitor after an iteration with this loss."""
        watch = self.watch
        is_usable = abs(loss) <= MAX_LOSS  # False for NaN
        # A NaN empties the losses: what comes after it has another level.
        with_loss = (*self.recent, loss)[-_MAX_LOSSES:] if is_usable else ()
        if watch is None:
            return LossMonitor(recent=with_loss)
        num_spikes = watch.num_spikes
        if self.is_spike(loss):
            num_spikes += 1
        elif loss <= (watch.level + watch.limit) / 2:
            num_spikes = 0
        # Within a series of spikes, losses below the limit are no baseline either.
        recent = with_loss if num_spikes == 0 else self.recent
        left = watch.left - 1
        # A series of spikes is watched to its end, but not forever: a loss that stays between
        # (level + limit) / 2 and the limit does not end it.
        has_lasted = left <= -WATCHED_ITERATIONS
        if left <= 0 and (num_spikes == 0 or has_lasted):
            return LossMonitor(recent=recent)
        update = {"left": left, "num_spikes": num_spikes}
        return LossMonitor(recent=recent, watch=watch.model_copy(update=update))


def _noise(losses: Sequence[float]) -> float:
    changes = [b - a for a, b in itertools.pairwise(losses)]
    if not changes:
        return 0.0
    slope = statistics.median(changes)
    return _NORMAL * statistics.median(abs(change - slope) for change in changes)
