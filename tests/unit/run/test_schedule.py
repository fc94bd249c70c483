"""Which iterations measure, and when a new target may be planned for."""

from collections.abc import Iterable

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.run.schedule import RefreshSchedule, ScheduleState

IN_PARTS = SnipConfig(start_step=5, interval=20, measure_fraction=0.25)
"""Refreshes at iterations 5 and 25, of four parts each."""


def measured(
    schedule: RefreshSchedule,
    iterations: Iterable[int],
    first_allowed: int = 0,
    wanted_at: int | None = None,
) -> dict[int, int]:
    """Return {iteration: part} of a run in which measuring is allowed from an iteration on."""
    parts = {}
    for iteration in iterations:
        if schedule.is_due(iteration, wanted_at):
            if iteration >= first_allowed:
                schedule.begin(iteration)
            else:
                schedule.wait(iteration)
        part = schedule.take_part(iteration)
        if part is not None:
            parts[iteration] = part
    return parts


def resumed(config: SnipConfig, stopped: RefreshSchedule, num_done: int) -> RefreshSchedule:
    schedule = RefreshSchedule(config, num_done)
    schedule.load_state_dict(stopped.state_dict(num_done))
    return schedule


def without(iterations: range, *skipped: int) -> list[int]:
    """The iterations that Megatron runs if it skips some (`--iterations-to-skip`)."""
    return [iteration for iteration in iterations if iteration not in skipped]


def test_young_moments_delay_a_refresh_and_not_the_next() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    assert measured(schedule, range(1, 31), first_allowed=12) == {12: 0, 15: 0, 25: 0}


def test_a_refresh_that_waits_is_due_after_a_resume() -> None:
    config = SnipConfig(start_step=5, interval=10)
    first = RefreshSchedule(config)
    assert measured(first, range(1, 9), first_allowed=12) == {}
    assert first.state_dict(8) == ScheduleState(None, due_since=5)
    second = resumed(config, first, 8)
    assert measured(second, range(9, 31), first_allowed=12) == {12: 0, 15: 0, 25: 0}


def test_a_refresh_whose_turn_comes_while_another_one_measures_is_left_out() -> None:
    config = SnipConfig(start_step=5, interval=10, measure_fraction=0.25)
    found = measured(RefreshSchedule(config), range(1, 31), first_allowed=13)
    assert list(found) == [13, 14, 15, 16, 25, 26, 27, 28]


def test_a_refresh_that_is_left_out_is_not_due_before_the_next_one() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    schedule.leave_out(5)
    assert measured(schedule, range(5, 31)) == {15: 0, 25: 0}


def test_an_iteration_that_is_repeated_measures_again() -> None:
    """The last run's measurement counts (`Observations.begin`)."""
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    schedule.begin(5)
    assert [schedule.take_part(5) for _ in range(3)] == [0, 0, 0]
    assert not schedule.is_due(5)
    assert schedule.take_part(6) is None


def test_uniform_plans_need_no_measurement() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10, policy="uniform-fp8"))
    assert measured(schedule, range(1, 31)) == {}
    assert schedule.state_dict(30) == ScheduleState()


@pytest.mark.parametrize("num_done", [5, 6, 7])
def test_a_refresh_in_parts_begins_again_after_a_resume(num_done: int) -> None:
    straight = measured(RefreshSchedule(IN_PARTS), range(1, 30))
    assert straight == {5: 0, 6: 1, 7: 2, 8: 3, 25: 0, 26: 1, 27: 2, 28: 3}
    first = RefreshSchedule(IN_PARTS)
    measured(first, range(1, num_done + 1))
    assert first.state_dict(num_done) == ScheduleState(5, due_since=5)
    again = measured(resumed(IN_PARTS, first, num_done), range(num_done + 1, 30))
    start = num_done + 1
    assert again == {start: 0, start + 1: 1, start + 2: 2, start + 3: 3, 25: 0, 26: 1, 27: 2, 28: 3}


def test_a_refresh_that_has_ended_does_not_begin_again_after_a_resume() -> None:
    first = RefreshSchedule(IN_PARTS)
    measured(first, range(1, 9))
    assert first.state_dict(8) == ScheduleState(5)
    second = resumed(IN_PARTS, first, 8)
    assert list(measured(second, range(9, 30))) == [25, 26, 27, 28]
    assert [second.is_last(part) for part in (None, 0, 3)] == [False, False, True]


@pytest.mark.parametrize(
    ("skipped", "first_refresh"),
    [
        ((), {5: 0, 6: 1, 7: 2, 8: 3}),
        ((5,), {6: 0, 7: 1, 8: 2, 9: 3}),
        ((6, 7), {5: 0, 8: 1, 9: 2, 10: 3}),
        ((8,), {5: 0, 6: 1, 7: 2, 9: 3}),
    ],
)
def test_a_refresh_measures_every_part_if_megatron_skips_iterations(
    skipped: tuple[int, ...], first_refresh: dict[int, int]
) -> None:
    found = measured(RefreshSchedule(IN_PARTS), without(range(1, 29), *skipped))
    assert found == first_refresh | {25: 0, 26: 1, 27: 2, 28: 3}


def test_a_refresh_is_due_after_a_resume_if_the_last_iteration_was_skipped() -> None:
    first = RefreshSchedule(IN_PARTS)
    assert measured(first, range(1, 5)) == {}
    assert list(measured(resumed(IN_PARTS, first, 5), range(6, 25))) == [6, 7, 8, 9]


def test_a_run_that_turns_snip_on_later_waits_for_the_next_turn() -> None:
    assert list(measured(RefreshSchedule(IN_PARTS, 6), range(7, 29))) == [25, 26, 27, 28]


def test_a_refresh_out_of_turn_is_due_from_where_it_is_wanted_until_it_begins() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=100))
    schedule.begin(5)
    schedule.take_part(5)
    assert [schedule.is_due(i, wanted_at=41) for i in (40, 41, 42)] == [False, True, True]
    schedule.begin(42)
    assert schedule.take_part(42) == 0
    assert not schedule.is_due(43, wanted_at=41)


def test_a_refresh_out_of_turn_replaces_one_that_measures() -> None:
    """The guard reverted the plan in iteration 6, so that part was not measured."""
    schedule = RefreshSchedule(IN_PARTS)
    assert measured(schedule, range(1, 7)) == {5: 0, 6: 1}
    again = measured(schedule, range(7, 25), wanted_at=7)
    assert again == {7: 0, 8: 1, 9: 2, 10: 3}


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
