"""Timing by turns: on the CPU, and by a GPU's events with stand-ins for them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import seconds_by_turns


class Clock:
    """A GPU that works off what it is given while the host goes on; times in seconds."""

    def __init__(self) -> None:
        self.host = 0.0
        self.done = 0.0
        self.slept: list[float] = []

    def work(self, host: float, device: float) -> None:
        """The host takes `host` to enqueue work of `device` seconds."""
        self.host += host
        self.done = max(self.done, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.done)

    def sleep(self, cycles: int) -> None:
        assert isinstance(cycles, int)
        self.slept.append(cycles / timing.CYCLES_A_SECOND)
        self.work(0.0, self.slept[-1])

    def event(self, enable_timing: bool) -> Any:
        clock = self

        class Event:
            at = -1.0

            def record(self) -> None:
                self.at = max(clock.done, clock.host)

            def synchronize(self) -> None:
                clock.host = max(clock.host, self.at)

            def elapsed_time(self, other: Any) -> float:
                return float(1e3 * (other.at - self.at))

        assert enable_timing
        return Event()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.host)
    return clock


def test_a_gpu_that_waits_for_the_host_is_timed_without_the_wait(clock: Clock) -> None:
    runs = {
        "slow to enqueue": lambda: clock.work(3e-3, 1e-3),
        "quick to enqueue": lambda: clock.work(1e-5, 2e-3),
    }
    alone = {"slow to enqueue": runs["slow to enqueue"]}
    assert seconds_by_turns(alone, rounds=3, gpu=True).seconds["slow to enqueue"] >= 2.9e-3
    ahead = seconds_by_turns(runs, rounds=3, gpu=True, ahead=True)
    assert ahead.seconds == pytest.approx({"slow to enqueue": 1e-3, "quick to enqueue": 2e-3})
    assert ahead.host_seconds == pytest.approx({"slow to enqueue": 3e-3, "quick to enqueue": 1e-5})


def test_a_gpu_is_not_held_up_for_long(clock: Clock) -> None:
    seconds_by_turns({"endless": lambda: clock.work(9.0, 1.0)}, rounds=1, gpu=True, ahead=True)
    assert clock.slept == [timing.LONGEST_SLEEP_S]


@pytest.mark.parametrize("gpu", [False, True])
def test_what_fails_takes_nothing_from_the_others(clock: Clock, gpu: bool) -> None:
    calls = []

    def in_its_third_run() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("too\nlate")

    def at_once() -> None:
        raise torch.OutOfMemoryError("no room")

    runs = {"late": in_its_third_run, "never": at_once, "well": lambda: clock.work(1e-3, 1e-3)}
    times = seconds_by_turns(runs, rounds=3, gpu=gpu)
    assert set(times.seconds) == {"well"}
    assert times.failed == {"late": "ValueError: too late", "never": "OutOfMemoryError: no room"}
    assert "never" not in times.host_seconds
