"""StepReport: everything that one training step has to tell, for writers that log step by step.

`StepReporter` hears the controller's messages one by one and gives its writers one report a step,
at the step's end. A report is never told out of order: its index is the step's, and a message of
before a resume (the plan that a static policy starts with is of step 0) goes with the step that
follows it. Nothing is told after `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_snip.reporting.reporter import Applied, Event, Refresh
from megatron_snip.reporting.scalars import StepScalars


@dataclass(frozen=True)
class StepReport:
    """One step.

    Attributes:
        index: where it belongs on the writer's axis of steps.
        scalars: by name; see `scalars.py`.
        refresh: made in this step, or None.
        applied: the plan applied before this step, or None.
        events: since the last report.
    """

    index: int
    scalars: dict[str, float]
    refresh: Refresh | None = None
    applied: Applied | None = None
    events: tuple[Event, ...] = ()


class StepWriter(Protocol):
    """Puts reports somewhere."""

    def write(self, report: StepReport) -> None:
        """Write a step; indices never fall."""


class StepReporter:
    """A `Reporter` that passes each step on as one report.

    Args:
        writers: are given every report.
        offset: added to the step (0-based) to give the index; Megatron counts from 1.
        interval: steps between two reports of training metrics; a step with news is always told.
        leave_out: metrics that somebody else logs.
    """

    def __init__(
        self,
        writers: Sequence[StepWriter],
        offset: int = 0,
        interval: int = 1,
        leave_out: Sequence[str] = (),
    ) -> None:
        self._writers = tuple(writers)
        self._offset = offset
        self._interval = max(1, interval)
        self._leave_out = frozenset(leave_out)
        self._closed = False
        self._scalars = StepScalars()
        self._refresh: Refresh | None = None
        self._applied: Applied | None = None
        self._events: list[Event] = []
        self._last_index = 0

    def refreshed(self, refresh: Refresh) -> None:
        """Keep it for the step's end."""
        self._refresh = refresh
        self._scalars.refreshed(refresh)

    def planned(self, applied: Applied) -> None:
        """Keep it for the step's end."""
        self._applied = applied
        self._scalars.planned(applied)

    def event(self, event: Event) -> None:
        """Keep it for the step's end."""
        self._events.append(event)
        self._scalars.event(event)

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Report the step, if it is due or has news."""
        if self._has_news or (step + self._offset) % self._interval == 0:
            self._report(step + self._offset, values)

    def close(self) -> None:
        """Report news of a step that has not ended; nothing is reported after."""
        if self._has_news and not self._closed:
            steps = [event.step for event in self._events]
            steps += [told.step for told in (self._refresh, self._applied) if told is not None]
            self._report(max(self._last_index, max(steps) + self._offset), {})
        self._closed = True

    @property
    def _has_news(self) -> bool:
        return bool(self._refresh or self._applied or self._events)

    def _report(self, index: int, values: dict[str, Any]) -> None:
        own = {name: value for name, value in values.items() if name not in self._leave_out}
        scalars = self._scalars.take(own)
        report = StepReport(index, scalars, self._refresh, self._applied, tuple(self._events))
        self._refresh, self._applied, self._events = None, None, []
        self._last_index = index
        if not self._closed:
            for writer in self._writers:
                writer.write(report)
