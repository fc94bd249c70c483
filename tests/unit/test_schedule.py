"""Which iterations measure."""

from megatron_snip.config import SnipConfig
from megatron_snip.refresh import Schedule


def measured(config: SnipConfig, iterations: int, first_allowed: int = 0) -> dict[int, int]:
    """Return {iteration: part} over a run in which measuring is allowed from an iteration on."""
    schedule = Schedule(config, lambda iteration: iteration >= first_allowed)
    parts = {i: schedule.part(i, None, True) for i in range(1, iterations + 1)}
    return {i: part for i, part in parts.items() if part is not None}


def test_young_moments_delay_a_refresh_and_not_the_next() -> None:
    config = SnipConfig(start_step=5, interval=10)
    assert measured(config, 30, first_allowed=12) == {12: 0, 15: 0, 25: 0}


def test_an_iteration_that_is_repeated_measures_once() -> None:
    schedule = Schedule(SnipConfig(start_step=5, interval=10), lambda _: True)
    assert [schedule.part(5, None, True) for _ in range(3)] == [0, None, None]


def test_uniform_plans_need_no_measurement() -> None:
    assert measured(SnipConfig(start_step=5, interval=10, policy="uniform-fp8"), 30) == {}
