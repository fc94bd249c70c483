"""Deadline: the wall-clock limit that all steps of making one plan share."""

from __future__ import annotations

import time


class Deadline:
    """Counts down from the moment it is made.

    Attributes:
        limit_s: seconds given in total.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self.limit_s - self.elapsed())
