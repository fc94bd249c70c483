"""Runs are made when what they need has finished, as many at a time as asked for, and once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_snip.comparison import pool as pool_module
from megatron_snip.comparison.pool import Event, Pool
from megatron_snip.comparison.run import Run
from megatron_snip.comparison.schedule import make_schedule
from tests.unit.comparison.build import FakeStore, comparison

RUNS = make_schedule(comparison(seeds=2)).runs


class FakeProcess:
    """Ends at the third look; notes how many live at a time."""

    living = 0
    most = 0

    def __init__(self, status: int = 0) -> None:
        self.started = 0.0
        self.ended = False
        self._looks = 3
        self._status = status
        FakeProcess.living += 1
        FakeProcess.most = max(FakeProcess.most, FakeProcess.living)

    def poll(self) -> int | None:
        self._looks -= 1
        if self._looks > 0:
            return None
        FakeProcess.living -= 1
        return self._status

    def end(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "POLL_S", 0.0)
    FakeProcess.living = FakeProcess.most = 0


def test_all_runs_are_made_in_an_order_that_respects_needs(tmp_path: Path) -> None:
    store, started, events = FakeStore(tmp_path), [], []

    def start(run: Run) -> FakeProcess:
        assert all(store.finished(needed) for needed in run.needs)
        started.append(run.key)
        return FakeProcess()

    pool = Pool(store, start, 2, events.append)
    pool.run(RUNS)
    assert sorted(started) == sorted(run.key for run in RUNS)
    assert FakeProcess.most == 2
    assert [event.done for event in events] == list(range(1, len(RUNS) + 1))
    assert not pool.failed


def test_finished_runs_are_not_made_again(tmp_path: Path) -> None:
    store = FakeStore(tmp_path)
    for run in RUNS[:4]:
        store.finish(run)
    events: list[Event] = []
    Pool(store, lambda run: FakeProcess(), 3, events.append).run(RUNS)
    assert set(store.prepared) == {run.key for run in RUNS[4:]}
    assert events[0].done == 5
    again = FakeStore(tmp_path)
    Pool(again, lambda run: FakeProcess(), 3, events.append).run(RUNS)
    assert again.prepared == []


def test_a_failed_run_takes_with_it_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    store = FakeStore(tmp_path)
    measurement = next(run for run in RUNS if run.kind == "measure")
    events: list[Event] = []

    def start(run: Run) -> FakeProcess:
        return FakeProcess(3 if run.key == measurement.key else 0)

    pool = Pool(store, start, 2, events.append)
    pool.run(RUNS)
    lost = {run.key for run in RUNS if measurement in run.needs}
    assert len(lost) == 5
    assert set(pool.failed) == {measurement.key, *lost}
    assert "exit status 3" in pool.failed[measurement.key]
    assert all(measurement.key in pool.failed[key] for key in lost)
    assert {run.key for run in RUNS if store.finished(run)} == {
        run.key for run in RUNS if run.key not in pool.failed
    }
    assert events[-1].done == len(RUNS)


def test_an_interrupt_ends_the_runs_under_way(tmp_path: Path) -> None:
    processes: list[FakeProcess] = []

    def start(run: Run) -> FakeProcess:
        if len(processes) == 3:
            raise KeyboardInterrupt
        processes.append(FakeProcess())
        return processes[-1]

    with pytest.raises(KeyboardInterrupt):
        Pool(FakeStore(tmp_path), start, 3, lambda event: None).run(RUNS)
    base, *others = processes
    assert not base.ended, "it had finished"
    assert [process.ended for process in others] == [True, True]
