"""Which iterations measure, and when a new target may be planned for."""

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.run.schedule import RefreshSchedule, ScheduleState


def measured(
    schedule: RefreshSchedule, iterations: range, first_allowed: int = 0
) -> dict[int, int]:
    """Return {iteration: part} of a run in which measuring is allowed from an iteration on."""
    parts = {}
    for iteration in iterations:
        if schedule.is_due(iteration):
            if iteration >= first_allowed:
                schedule.begin(iteration)
            else:
                schedule.wait()
        part = schedule.part(iteration)
        if part is not None:
            parts[iteration] = part
    return parts


def test_young_moments_delay_a_refresh_and_not_the_next() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    assert measured(schedule, range(1, 31), first_allowed=12) == {12: 0, 15: 0, 25: 0}


def test_an_iteration_that_is_repeated_measures_again() -> None:
    """The last run's measurement counts (`Observations.begin`)."""
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10))
    schedule.begin(5)
    assert [schedule.part(5) for _ in range(3)] == [0, 0, 0]
    assert not schedule.is_due(5)


def test_uniform_plans_need_no_measurement() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=10, policy="uniform-fp8"))
    assert measured(schedule, range(1, 31)) == {}


def test_a_refresh_in_parts_continues_after_a_resume() -> None:
    config = SnipConfig(start_step=5, interval=20, measure_fraction=0.25)
    straight = measured(RefreshSchedule(config), range(1, 30))
    assert straight == {5: 0, 6: 1, 7: 2, 8: 3, 25: 0, 26: 1, 27: 2, 28: 3}
    first = RefreshSchedule(config)
    parts = measured(first, range(1, 7))
    second = RefreshSchedule(config)
    assert first.state_dict() == ScheduleState(5)
    second.load_state_dict(first.state_dict())
    assert parts | measured(second, range(7, 30)) == straight
    assert [second.is_last(part) for part in (None, 0, 3)] == [False, False, True]


def test_a_refresh_out_of_turn_is_due_where_it_is_wanted() -> None:
    schedule = RefreshSchedule(SnipConfig(start_step=5, interval=100))
    assert [schedule.is_due(i, wanted_at=41) for i in (40, 41, 42)] == [False, True, False]


@pytest.mark.parametrize(("iteration", "may"), [(97, True), (98, True), (99, False), (100, True)])
def test_a_new_target_is_planned_for_unless_a_refresh_comes_first(
    iteration: int, may: bool
) -> None:
    config = SnipConfig(start_step=100, interval=200, lag=2, target_schedule="0:0.75,98:0.5")
    assert RefreshSchedule(config).may_plan_for_new_target(iteration) == may
