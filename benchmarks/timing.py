"""Timing several ways of doing the same work against each other, in one run.

On a GPU by CUDA events around every call, on the CPU by the process's own CPU time (neighbours on
a shared machine do not count; one thread). Ways take turns round by round, so that a drift of the
clock meets all of them; a way's time is the median over rounds. A way that fails is left out and
its reason is kept: it takes nothing from the others.

A GPU that waits for Python to enqueue the next kernel is timed waiting. With `ahead` it is given
something to wait for first, for as long as enqueueing the work took before, so that only its own
work is timed; how long enqueueing took is reported beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], Any]

CYCLES_A_SECOND = 2.0e9
"""At least a GPU's clock; what it sleeps is counted in cycles."""

LONGEST_SLEEP_S = 0.05
"""Of a GPU that is kept waiting; work that is longer in enqueueing is not held up."""


@dataclass(frozen=True)
class Times:
    """What was measured.

    Attributes:
        seconds: median of each way that ran.
        runs: seconds of each timed run of these, in the order of the rounds.
        host_seconds: what enqueueing each took on the host; on a GPU alone.
        failed: why the others did not run.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    runs: dict[str, list[float]] = field(default_factory=dict)
    host_seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def seconds_by_turns(runs: Mapping[str, Run], rounds: int, gpu: bool, ahead: bool = False) -> Times:
    """Return the median seconds of each way.

    Args:
        runs: name -> work; each is run before anything is timed.
        rounds: timed runs of each.
        gpu: time by CUDA events in place of CPU time.
        ahead: let the host run ahead of the GPU; see the file's description.
    """
    times = Times()
    able = {name: run for name, run in runs.items() if _warmed(name, run, gpu, times)}
    spans: dict[str, list[Any]] = {name: [] for name in able}
    for _ in range(rounds):
        for name, run in list(able.items()):
            try:
                spans[name].append(_timed(run, gpu, times.host_seconds.get(name, 0.0) * ahead))
            except Exception as error:  # the other ways go on
                times.failed[name] = said(error)
                del able[name]
    for name in able:
        times.runs[name] = [_seconds(span) for span in spans[name]]
        times.seconds[name] = statistics.median(times.runs[name])
    return times


def said(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def sleep(seconds: float) -> None:
    """Let the GPU wait; returns at once."""
    if seconds > 0:
        rest: Any = torch.cuda._sleep
        rest(int(min(seconds, LONGEST_SLEEP_S) * CYCLES_A_SECOND))


def _warmed(name: str, run: Run, gpu: bool, times: Times) -> bool:
    """Whether a way runs: once to compile and fill caches, on a GPU again to time the host."""
    try:
        run()
        if gpu:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            times.host_seconds[name] = time.perf_counter() - begin
            torch.cuda.synchronize()
    except Exception as error:  # e.g. out of memory, or a library without such a GEMM
        times.failed[name] = said(error)
        times.host_seconds.pop(name, None)
        if gpu:
            torch.cuda.empty_cache()
        return False
    return True


def _timed(run: Run, gpu: bool, held_s: float) -> Any:
    """Return seconds, or the two events between which a GPU worked."""
    if not gpu:
        begin = time.process_time()
        run()
        return time.process_time() - begin
    make_event: Any = torch.cuda.Event
    start, stop = make_event(enable_timing=True), make_event(enable_timing=True)
    sleep(1.5 * held_s + 1e-4 if held_s else 0.0)
    start.record()
    run()
    stop.record()
    return start, stop


def _seconds(span: Any) -> float:
    if isinstance(span, float):
        return span
    start, stop = span
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
