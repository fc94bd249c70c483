"""Which iterations measure, and when a new target may be planned for."""

from collections.abc import Iterable

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.run.schedule import RefreshSchedule, ScheduleState

CONFIG = SnipConfig(start_step=5, interval=20)
"""Refreshes at iterations 5 and 25."""


def measured(
    schedule: RefreshSchedule,
    iterations: Iterable[int],
    first_allowed: int = 0,
    wanted_at: int | None = None,
) -> list[int]:
    """Return the measured iterations of a run that may measure from an iteration on."""
    found = []
    for iteration in iterations:
        if schedule.is_due(iteration, wanted_at):
            if iteration >= first_allowed:
                schedule.begin(iteration)
            else:
                schedule.wait(iteration)
        if schedule.measures(iteration):
            found.append(iteration)
    return found


def resumed(config: SnipConfig, stopped: RefreshSchedule, num_done: int) -> RefreshSchedule:
    schedule = RefreshSchedule(config, num_done)
    schedule.load_state_dict(stopped.state_dict(num_done))
    return schedule


def without(iterations: range, *skipped: int) -> list[int]:
    """The iterations that Megatron runs if it skips some (`--iterations-to-skip`)."""
    return [iteration for iteration in iterations if iteration not in skipped]


def test_young_moments_delay_a_refresh_and_not_the_next() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    assert measured(schedule, range(1, 31), first_allowed=12) == [12, 15, 25]


def test_a_refresh_that_waits_is_due_after_a_resume() -> None:
    config = SnipConfig(start_step=5, interval=10)
    first = RefreshSchedule(config)
    assert measured(first, range(1, 9), first_allowed=12) == []
    assert first.state_dict(8) == ScheduleState(None, due_since=5)
    second = resumed(config, first, 8)
    assert measured(second, range(9, 31), first_allowed=12) == [12, 15, 25]


def test_a_refresh_that_is_left_out_is_not_due_before_the_next_one() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    schedule.leave_out(5)
    assert measured(schedule, range(5, 31)) == [15, 25]


def test_an_iteration_that_is_repeated_measures_again() -> None:
    """The last run's measurement counts (`Observations.begin`)."""
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    schedule.begin(5)
    assert [schedule.measures(5) for _ in range(3)] == [True, True, True]
    assert not schedule.is_due(5)
    assert not schedule.measures(6)


def test_uniform_plans_need_no_measurement() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10, policy="uniform-fp8"))
    assert measured(schedule, range(1, 31)) == []
    assert schedule.state_dict(30) == ScheduleState()


@pytest.mark.parametrize("num_done", [5, 6, 24])
def test_a_refresh_that_has_ended_does_not_begin_again_after_a_resume(num_done: int) -> None:
    first = RefreshSchedule(CONFIG)
    assert measured(first, range(1, num_done + 1)) == [5]
    assert first.state_dict(num_done) == ScheduleState(5)
    second = resumed(CONFIG, first, num_done)
    assert measured(second, range(num_done + 1, 30)) == [25]


@pytest.mark.parametrize(
    ("skipped", "first_refresh"), [((), 5), ((5,), 6), ((5, 6, 7), 8), ((6, 7), 5)]
)
def test_a_refresh_is_measured_if_megatron_skips_its_iteration(
    skipped: tuple[int, ...], first_refresh: int
) -> None:
    found = measured(RefreshSchedule(CONFIG), without(range(1, 29), *skipped))
    assert found == [first_refresh, 25]


def test_a_refresh_is_due_after_a_resume_if_the_last_iteration_was_skipped() -> None:
    first = RefreshSchedule(CONFIG)
    assert measured(first, range(1, 5)) == []
    assert measured(resumed(CONFIG, first, 5), range(6, 25)) == [6]


def test_a_run_that_turns_snip_on_later_waits_for_the_next_turn() -> None:
    assert measured(RefreshSchedule(CONFIG, 6), range(7, 29)) == [25]


def test_a_refresh_out_of_turn_is_due_from_where_it_is_wanted_until_it_begins() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=100))
    schedule.begin(5)
    assert [schedule.is_due(i, wanted_at=41) for i in (40, 41, 42)] == [False, True, True]
    schedule.begin(42)
    assert schedule.measures(42)
    assert not schedule.is_due(43, wanted_at=41)


def test_a_refresh_out_of_turn_may_follow_one_by_turn() -> None:
    """The guard reverted the plan in iteration 5, so it was not measured."""
    schedule = RefreshSchedule(CONFIG)
    assert measured(schedule, range(1, 7)) == [5]
    assert measured(schedule, range(7, 25), wanted_at=7) == [7]


@pytest.mark.parametrize(("iteration", "may"), [(97, True), (98, True), (99, False), (101, True)])
def test_a_new_target_is_planned_for_unless_a_refresh_comes_first(
    iteration: int, may: bool
) -> None:
    config = SnipConfig(start_step=100, interval=200, lag=2, target_schedule="0:0.75,98:0.5")
    schedule = RefreshSchedule(config)
    measured(schedule, range(1, iteration + 1))
    assert schedule.may_plan_for_new_target(iteration) == may


def test_no_new_target_is_planned_for_while_a_refresh_waits() -> None:
    config = SnipConfig(start_step=100, interval=200, lag=2, target_schedule="0:0.75,98:0.5")
    schedule = RefreshSchedule(config)
    measured(schedule, range(1, 111), first_allowed=150)
    assert not schedule.may_plan_for_new_target(110)
