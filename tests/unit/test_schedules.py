"""Which iterations measure, and targets over iterations."""

from megatron_snip.config import SnipConfig, make_config
from megatron_snip.refresh import Schedule
from megatron_snip.target_schedule import RAMP_STEP


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


def targets(iterations: list[int], **config: object) -> list[float]:
    schedule = SnipConfig(**config).targets(10_000)
    return [schedule.at(i) for i in iterations]


def test_targets_hold_from_their_iterations_on() -> None:
    text = "0:0,200:0.75,9000:0.5,9500:0"
    wanted = [0.0, 0.0, 0.75, 0.75, 0.5, 0.0, 0.0]
    assert targets([1, 199, 200, 8999, 9000, 9500, 10**6], target_schedule=text) == wanted
    assert targets([1, 199, 200], target_schedule="200:0.5", efficiency_target=0.25) == [
        0.25, 0.25, 0.5
    ]  # fmt: skip
    assert targets([1, 10_000]) == [0.75, 0.75]


def test_a_ramp_is_linear_to_within_half_a_step() -> None:
    found = targets(list(range(100, 501)), target_schedule="100:0.8,500:~0.1")
    assert (found[0], found[-1]) == (0.8, 0.1)
    assert len(set(found)) == 15  # fourteen plans
    for k, target in enumerate(found):
        assert abs(target - (0.8 - 0.7 * k / 400)) <= RAMP_STEP / 2 + 1e-9


def test_healing_ends_at_zero_before_the_run() -> None:
    for start in (9000.0, 0.9):
        healed = targets([8999, 9000, 9498, 9995, 10_000], heal_from=start, target_schedule="5:0.6")
        assert healed == [0.6, 0.6, 0.3, 0.0, 0.0]
    assert make_config({"heal_from": 0.07}).targets(100).heal_from == 7  # 0.07 * 100 is above 7
