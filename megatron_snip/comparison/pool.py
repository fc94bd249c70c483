"""Pool: makes the runs of a schedule, several at a time, each when what it needs has finished.

Runs that have finished before are passed over. A run that fails is noted with the end of its log;
runs that need it are not made, all others are. An interrupt ends the runs under way, which are then
made anew by the next comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.run import Run
from megatron_snip.comparison.store import Store
from megatron_snip.errors import SnipError

POLL_S = 0.2
_TAIL = 600


class Process(Protocol):
    """What the pool asks of a started run; `process.TrainingProcess` is one."""

    started: float

    def poll(self) -> int | None:
        """Return its exit status, or None while it lives."""

    def end(self) -> None:
        """End it and wait."""


Start = Callable[[Run], Process]
"""Starts a run whose files are prepared."""


@dataclass(frozen=True)
class Event:
    """What happened to a run.

    Attributes:
        run: which.
        outcome: its numbers, or None if it failed.
        problem: why it failed, or None.
        seconds: from start to end.
        done: runs finished or failed so far, those of earlier comparisons included.
        total: of the schedule.
    """

    run: Run
    outcome: Outcome | None
    problem: str | None
    seconds: float
    done: int
    total: int


class Pool:
    """Makes runs.

    Attributes:
        failed: why each failed run did, by key; runs that were not made for that reason included.
    """

    def __init__(
        self, store: Store, start: Start, jobs: int, tell: Callable[[Event], None]
    ) -> None:
        """Bring together what is needed.

        Args:
            store: where files lie.
            start: starts a prepared run.
            jobs: runs at a time.
            tell: told of every run that ends.
        """
        self.failed: dict[str, str] = {}
        self._store = store
        self._start = start
        self._jobs = jobs
        self._tell = tell
        self._active: dict[str, tuple[Run, Process]] = {}
        self._finished: set[str] = set()

    def run(self, runs: Sequence[Run]) -> None:
        """Make all runs that have not finished; on an interrupt end those under way and raise."""
        self._finished = {run.key for run in runs if self._store.finished(run)}
        waiting = [run for run in runs if run.key not in self._finished]
        total = len(runs)
        try:
            while waiting or self._active:
                waiting = self._begin(waiting, total)
                if self._active:
                    time.sleep(POLL_S)
                self._collect(total)
        finally:
            for _, process in self._active.values():
                process.end()

    def _begin(self, waiting: list[Run], total: int) -> list[Run]:
        """Start what can be started, in order; return what still waits."""
        still: list[Run] = []
        for run in waiting:
            missing = [n.key for n in run.needs if n.key not in self._finished]
            lost = next((key for key in missing if key in self.failed), None)
            if lost is not None:
                self._fail(run, f"needs {lost}, which failed", 0.0, total)
            elif missing or len(self._active) >= self._jobs:
                still.append(run)
            else:
                try:
                    self._store.prepare(run)
                    self._active[run.key] = (run, self._start(run))
                except (SnipError, OSError) as error:
                    self._fail(run, str(error), 0.0, total)
        return still

    def _collect(self, total: int) -> None:
        """See which runs have ended, and how."""
        for key, (run, process) in list(self._active.items()):
            status = process.poll()
            if status is None:
                continue
            del self._active[key]
            seconds = time.monotonic() - process.started
            if status != 0:
                self._fail(run, f"exit status {status}: {self._log_end(run)}", seconds, total)
                continue
            try:
                outcome = self._store.finish(run)
            except SnipError as error:
                self._fail(run, str(error), seconds, total)
                continue
            self._finished.add(key)
            self._tell(Event(run, outcome, None, seconds, self._done, total))

    @property
    def _done(self) -> int:
        return len(self._finished) + len(self.failed)

    def _fail(self, run: Run, problem: str, seconds: float, total: int) -> None:
        self.failed[run.key] = problem
        self._tell(Event(run, None, problem, seconds, self._done, total))

    def _log_end(self, run: Run) -> str:
        path = self._store.log(run)
        text = path.read_text(errors="replace") if path.is_file() else ""
        return " ".join(text[-_TAIL:].split())
