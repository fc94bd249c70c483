"""A writer that is slow, broken or gone costs the training thread nothing."""

import threading

import pytest

from megatron_snip.errors import SnipError
from megatron_snip.reporting import background
from megatron_snip.reporting.background import BackgroundWriter
from megatron_snip.reporting.events import Event, Metrics, Reporter


class Slow:
    """Writes when `may_write` is set; raises in iteration 2."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.written: list[int] = []
        self.threads: set[str] = set()
        self.is_closed = False

    def write(self, event: Event) -> None:
        self.may_write.wait(60)
        self.threads.add(threading.current_thread().name)
        if event.iteration == 2:
            raise SnipError("the disk is full")
        self.written.append(event.iteration)

    def close(self) -> None:
        self.is_closed = True


def events(writer: BackgroundWriter, *iterations: int) -> None:
    reporter = Reporter([writer])
    for iteration in iterations:
        reporter.write(Event(iteration, Metrics({})))


def test_events_are_written_in_order_by_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    writer = BackgroundWriter(slow)
    events(writer, 1, 2, 3)  # returns although nothing can be written
    assert slow.written == []
    slow.may_write.set()
    writer.flush()
    assert slow.written == [1, 3] and slow.threads == {"Slow"}
    assert caplog.text.count("Slow failed: SnipError: the disk is full") == 1
    events(writer, 2)
    writer.close()
    assert slow.is_closed
    assert caplog.text.count("the disk is full") == 1


def test_a_writer_that_hangs_is_waited_for_no_longer_than_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 0.05)
    slow = Slow()
    writer = BackgroundWriter(slow)
    events(writer, 1)
    Reporter([writer]).flush(0.05)
    writer.close()
    assert slow.written == [] and not slow.is_closed
    assert caplog.text.count("Slow is late") == 1
    slow.may_write.set()


def test_events_of_a_writer_that_is_far_behind_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    slow = Slow()
    writer = BackgroundWriter(slow)
    events(writer, *range(10, 30))
    assert caplog.text.count("Slow is 3 events behind: events are left out there") == 1
    slow.may_write.set()
    writer.flush()
    assert slow.written[:3] == [10, 11, 12] and len(slow.written) <= 4
