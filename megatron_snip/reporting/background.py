"""Writers off the training thread: other ranks wait for none of them.

A picture takes a second, a shared file system may take many, and W&B half a minute. At 16,384 ranks
a second of one rank is 4.5 GPU hours.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from megatron_snip.errors import SnipError
from megatron_snip.log import log_failure, warn_once
from megatron_snip.reporting.events import Event, Writer

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Events that wait for a writer. Those that come while there are so many are left out."""
FLUSH_S = 10.0
"""Longest wait for a writer before a checkpoint."""
CLOSE_S = 60.0
"""Longest wait for a writer at the end of the run."""


class BackgroundWriter:
    """A writer that works in a thread of its own, which the first event starts.

    It gets events in their order. Its errors are logged once, and lose the event that it was given.
    """

    def __init__(self, writer: Writer) -> None:
        """Wrap a writer; from here on only the thread uses it."""
        self._writer = writer
        self._actions: queue.Queue[Callable[[], None]] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None

    def write(self, event: Event) -> None:
        """Let the thread write an event; does not wait."""
        self._submit(partial(self._writer.write, event))

    def flush(self, limit_s: float = FLUSH_S) -> None:
        """Wait until all events are written, but at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        # Its lock is not held while the writer works.
        with self._actions.all_tasks_done:
            while self._actions.unfinished_tasks:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    warn_once(logger, f"snip: {self._name} is late: it has not written all events")
                    return
                self._actions.all_tasks_done.wait(remaining_s)

    def close(self) -> None:
        """Write what waits and close the writer; gives up after `CLOSE_S` seconds."""
        self._submit(self._writer.close)
        self.flush(CLOSE_S)

    @property
    def _name(self) -> str:
        return type(self._writer).__name__

    def _submit(self, action: Callable[[], None]) -> None:
        if self._thread is None:
            # It must not keep a process alive whose training has ended.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._actions.put_nowait(action)
        except queue.Full:
            text = f"snip: {self._name} is {MOST_WAITING} events behind: events are left out there"
            warn_once(logger, text)

    def _work(self) -> None:
        while True:
            action = self._actions.get()
            try:
                action()
            except Exception as error:  # a full disk, for example; it may have space again later
                line = log_failure(logger, self._name, error)
                if isinstance(error, SnipError):  # its line says all: it has no traceback
                    warn_once(logger, f"snip: {self._name} failed: {line}")
            finally:
                self._actions.task_done()


def in_background(writers: Sequence[Writer]) -> list[BackgroundWriter]:
    """Return the writers, each in a thread of its own."""
    return [BackgroundWriter(writer) for writer in writers]
