"""Timing several ways of doing the same work against each other, in one run.

On a GPU by CUDA events around every call, on the CPU by the process's own CPU time (neighbours on
a shared machine do not count; one thread). Ways take turns round by round, so that a drift of the
clock meets all of them; a way's time is the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Run = Callable[[], Any]


def seconds_by_turns(runs: Mapping[str, Run], rounds: int, gpu: bool) -> dict[str, float]:
    """Return the median seconds of each way.

    Args:
        runs: name -> work; each is run once before anything is timed.
        rounds: timed runs of each.
        gpu: time by CUDA events in place of CPU time.
    """
    for run in runs.values():
        run()
    if gpu:
        return _on_gpu(runs, rounds)
    spans: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            spans[name].append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in spans.items()}


def _on_gpu(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    make_event: Any = torch.cuda.Event
    spans: dict[str, list[Any]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start, stop = make_event(enable_timing=True), make_event(enable_timing=True)
            start.record()
            run()
            stop.record()
            spans[name].append((start, stop))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(stop) for start, stop in pairs) / 1e3
        for name, pairs in spans.items()
    }
