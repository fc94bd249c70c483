"""Schedule: when a refresh is due, and whether what it measures leads to plans. Settings in."""

from __future__ import annotations

from megatron_snip.config import SnipConfig

STATIC_POLICIES = ("uniform-", "random", "layer-type", "layer-id", "none")
"""Beginnings of the policies that look at names and FLOPs only: planned once, never refreshed."""


class Schedule:
    """The settings that say what happens when; the same on all ranks.

    Attributes:
        static: the policy needs no statistics, so that its plan holds from the first step.
        replans: refreshes lead to plans.
        refreshed: the last step whose refresh was begun, or None.
    """

    def __init__(self, config: SnipConfig, refreshed: int | None = None) -> None:
        """Start, or go on after the refresh of step `refreshed`."""
        self.static = config.policy.startswith(STATIC_POLICIES)
        self.replans = not (self.static or config.collect_only or config.freeze_plan)
        self.refreshed = refreshed
        self._config = config

    def due(self, step: int, wanted_at: int | None = None) -> bool:
        """Whether step `step` (0-based) begins with a refresh.

        Args:
            step: training step.
            wanted_at: a step at which one is wanted out of turn.
        """
        c = self._config
        if self.static and not (c.collect_only or c.freeze_plan):
            return False
        if step < c.start_step or (c.stop_step is not None and step >= c.stop_step):
            return False
        if step == self.refreshed:  # Megatron repeats a step whose result it doubts
            return False
        return step == wanted_at or (step - c.start_step) % c.interval == 0
