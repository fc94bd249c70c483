"""Which iterations measure, and when a new target may be planned for."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.run.schedule import Schedule, ScheduleState

CONFIG = SnipConfig(start_step=5, interval=20)
"""Refreshes at iterations 5 and 25."""


class Run:
    """A run that measures by its schedule.

    Args:
        config: settings.
        done: iterations that are done.
        state: of a stopped run.
    """

    def __init__(
        self, config: SnipConfig, done: int = 0, state: ScheduleState | None = None
    ) -> None:
        self.schedule = Schedule(config)
        self.state = state or ScheduleState()
        self.done = done

    def measured(
        self, iterations: Iterable[int], first_allowed: int = 0, wanted_at: int | None = None
    ) -> list[int]:
        """Return the measured iterations, if the run may measure from an iteration on."""
        found = []
        for iteration in iterations:
            since = self.schedule.due_since(self.state, self.done, iteration, wanted_at)
            if since is not None and iteration >= first_allowed:
                self.state = ScheduleState(iteration)
                found.append(iteration)
            elif since is not None:
                self.state = replace(self.state, due_since=since)
            self.done = iteration
        return found

    def stopped(self, iteration: int) -> ScheduleState:
        """Return what a checkpoint after an iteration keeps."""
        return self.schedule.checkpointed(self.state, self.done, iteration)


def without(iterations: range, *skipped: int) -> list[int]:
    """The iterations that Megatron runs if it skips some (`--iterations-to-skip`)."""
    return [iteration for iteration in iterations if iteration not in skipped]


def test_young_moments_delay_a_refresh_and_not_the_next() -> None:
    run = Run(SnipConfig(start_step=5, interval=10))
    assert run.measured(range(1, 31), first_allowed=12) == [12, 15, 25]


def test_a_refresh_that_waits_is_due_after_a_resume() -> None:
    config = SnipConfig(start_step=5, interval=10)
    first = Run(config)
    assert first.measured(range(1, 9), first_allowed=12) == []
    assert first.stopped(8) == ScheduleState(None, due_since=5)
    second = Run(config, 8, first.stopped(8))
    assert second.measured(range(9, 31), first_allowed=12) == [12, 15, 25]


def test_a_refresh_that_is_left_out_is_not_due_before_the_next_one() -> None:
    """The controller leaves one out while a plan is on its way: its turn passes."""
    run = Run(SnipConfig(start_step=5, interval=10), done=5)
    assert run.measured(range(6, 31)) == [15, 25]


def test_uniform_plans_need_no_measurement() -> None:
    run = Run(SnipConfig(start_step=5, interval=10, policy="uniform-fp8"))
    assert run.measured(range(1, 31)) == []
    assert run.stopped(30) == ScheduleState()


@pytest.mark.parametrize("num_done", [5, 6, 24])
def test_a_refresh_that_has_ended_does_not_begin_again_after_a_resume(num_done: int) -> None:
    first = Run(CONFIG)
    assert first.measured(range(1, num_done + 1)) == [5]
    assert first.stopped(num_done) == ScheduleState(5)
    second = Run(CONFIG, num_done, first.stopped(num_done))
    assert second.measured(range(num_done + 1, 30)) == [25]


@pytest.mark.parametrize(
    ("skipped", "first_refresh"), [((), 5), ((5,), 6), ((5, 6, 7), 8), ((6, 7), 5)]
)
def test_a_refresh_is_measured_if_megatron_skips_its_iteration(
    skipped: tuple[int, ...], first_refresh: int
) -> None:
    assert Run(CONFIG).measured(without(range(1, 29), *skipped)) == [first_refresh, 25]


def test_a_refresh_is_due_after_a_resume_if_the_last_iteration_was_skipped() -> None:
    first = Run(CONFIG)
    assert first.measured(range(1, 5)) == []
    assert Run(CONFIG, 5, first.stopped(5)).measured(range(6, 25)) == [6]


def test_a_run_that_turns_snip_on_later_waits_for_the_next_turn() -> None:
    assert Run(CONFIG, 6).measured(range(7, 29)) == [25]


def test_a_refresh_out_of_turn_is_due_from_where_it_is_wanted_until_it_is_measured() -> None:
    schedule = Schedule(SnipConfig(start_step=5, interval=100))
    before = ScheduleState(5)
    due = [schedule.due_since(before, i - 1, i, wanted_at=41) for i in (40, 41, 42)]
    assert due == [None, 41, 42]
    assert schedule.due_since(ScheduleState(42), 42, 43, wanted_at=41) is None


def test_a_refresh_out_of_turn_may_follow_one_by_turn() -> None:
    """The guard reverted the plan in iteration 5, so it was not measured."""
    run = Run(CONFIG)
    assert run.measured(range(1, 7)) == [5]
    assert run.measured(range(7, 25), wanted_at=7) == [7]


@pytest.mark.parametrize(("iteration", "may"), [(97, True), (98, True), (99, False), (101, True)])
def test_a_new_target_is_planned_for_unless_a_refresh_comes_first(
    iteration: int, may: bool
) -> None:
    config = SnipConfig(start_step=100, interval=200, lag=2, target_schedule="0:0.75,98:0.5")
    run = Run(config)
    run.measured(range(1, iteration + 1))
    assert run.schedule.may_plan_for_new_target(run.state, iteration) == may


def test_no_new_target_is_planned_for_while_a_refresh_waits() -> None:
    config = SnipConfig(start_step=100, interval=200, lag=2, target_schedule="0:0.75,98:0.5")
    run = Run(config)
    run.measured(range(1, 111), first_allowed=150)
    assert not run.schedule.may_plan_for_new_target(run.state, 110)
