"""Schedule: when a measurement is due, and whether what it measures leads to plans. Settings in."""

from __future__ import annotations

import math

from megatron_snip.config import SnipConfig
from megatron_snip.planning.policies import get_policy


class Schedule:
    """The settings that say what happens when; the same on all ranks.

    A refresh observes the training iterations `start`, `start + 1`, .. of which each measures one
    of `num_parts` parts of the linears.

    Attributes:
        static: the policy needs no statistics, so that its plan holds from the first step.
        replans: refreshes lead to plans.
        num_parts: training iterations that one refresh observes.
        refreshed: the first step of the last refresh that was begun, or None.
    """

    def __init__(self, config: SnipConfig, refreshed: int | None = None) -> None:
        """Start, or go on after the refresh that was begun in step `refreshed`."""
        self.static = not get_policy(config.policy).needs_statistics
        self.replans = not (self.static or config.collect_only or config.freeze_plan)
        self.num_parts = math.ceil(1 / config.measure_fraction - 1e-9)
        self.refreshed = refreshed
        self._config = config
        self._measured: int | None = None

    def part(self, step: int, wanted_at: int | None = None, may_begin: bool = True) -> int | None:
        """Return which part of the linears training step `step` measures; None for none.

        Args:
            step: training step (0-based).
            wanted_at: a step at which a refresh is wanted out of turn.
            may_begin: whether a refresh may begin.
        """
        if step == self._measured:  # Megatron repeats a step whose result it doubts
            return None
        if may_begin and self._is_due(step, wanted_at):
            self.refreshed = step
        if self.refreshed is None or not 0 <= step - self.refreshed < self.num_parts:
            return None
        self._measured = step
        return step - self.refreshed

    def _is_due(self, step: int, wanted_at: int | None) -> bool:
        c = self._config
        if self.static and not (c.collect_only or c.freeze_plan):
            return False
        if step < c.start_step or (c.stop_step is not None and step >= c.stop_step):
            return False
        if self.refreshed is not None and 0 <= step - self.refreshed < self.num_parts:
            return False
        return step == wanted_at or (step - c.start_step) % c.interval == 0
