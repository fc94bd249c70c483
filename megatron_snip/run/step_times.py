"""The mean time of a baseline step under the current plan."""

from collections.abc import Mapping
from typing import Any


class StepTimes:
    """Adds up the seconds of baseline steps under the current plan.

    An iteration is no baseline step if it measured, was judged by the guard, was repeated by
    Megatron, or was the first under its plan or in this process.
    """

    def __init__(self) -> None:
        """Start before the first iteration of a process."""
        self.start_plan()

    @property
    def mean_s(self) -> float | None:
        """The mean in seconds; None without a baseline step."""
        return self._sum_s / self._count if self._count else None

    def start_plan(self) -> None:
        """Start anew: the coming iteration is the first under its plan."""
        self._sum_s = 0.0
        self._count = 0
        self._is_baseline = False

    def leave_out(self) -> None:
        """Leave out the iteration that runs."""
        self._is_baseline = False

    def end_iteration(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Add a baseline step's `step_s` (seconds); return the metrics.

        If it was no baseline step, they are returned without `step_s`. The next iteration is
        a baseline step, unless `leave_out` or `start_plan` is called.
        """
        counted = dict(metrics)
        if not self._is_baseline:
            counted.pop("step_s", None)
        elif "step_s" in counted:
            self._sum_s += counted["step_s"]
            self._count += 1
        self._is_baseline = True
        return counted
