"""The mean time of an ordinary iteration under the current plan."""

from collections.abc import Mapping
from typing import Any


class StepTimes:
    """Adds up the seconds of ordinary iterations under the current plan.

    An iteration is not ordinary if it measured, was judged by the guard, was repeated by Megatron,
    or was the first under its plan or in this process.
    """

    def __init__(self) -> None:
        """Start before the first iteration of a process."""
        self.start_plan()

    @property
    def mean_s(self) -> float | None:
        """The mean in seconds; None without an ordinary iteration."""
        return self._sum_s / self._count if self._count else None

    def start_plan(self) -> None:
        """Start anew: the coming iteration is the first under its plan."""
        self._sum_s = 0.0
        self._count = 0
        self._is_ordinary = False

    def leave_out(self) -> None:
        """Leave out the iteration that runs."""
        self._is_ordinary = False

    def end_iteration(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Add an ordinary iteration's `step_s` (seconds); return the metrics.

        If the iteration was not ordinary, they are returned without `step_s`. The next iteration is
        ordinary, unless `leave_out` or `start_plan` is called.
        """
        counted = dict(metrics)
        if not self._is_ordinary:
            counted.pop("step_s", None)
        elif "step_s" in counted:
            self._sum_s += counted["step_s"]
            self._count += 1
        self._is_ordinary = True
        return counted
