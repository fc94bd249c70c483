import numpy as np

from tests.unit.planning.build import problem_of, rules_of

LOSSES = [[0.0, 1.0]] * 4


def columns(*wanted: int) -> np.ndarray:
    return np.array(wanted)


def test_the_overall_target_is_a_sum_of_gains() -> None:
    task = rules_of(problem_of(LOSSES, target=0.5)).task()
    assert task.holds(columns(0, 1, 1, 0))
    assert not task.holds(columns(0, 1, 0, 0))


def test_a_stage_that_misses_its_floor_fails_the_task() -> None:
    problem = problem_of(LOSSES, target=0.5, stages=[0, 0, 1, 1])
    task = rules_of(problem, pipeline_balance="stage").task()
    assert task.least is None  # the floors imply it
    assert task.holds(columns(0, 1, 1, 0))
    assert not task.holds(columns(1, 1, 0, 0))


def test_columns_that_are_not_allowed_fail_the_task() -> None:
    task = rules_of(problem_of([[0.0, None], [0.0, 1.0]], target=0.0)).task()
    assert not task.holds(columns(1, 0))
    assert not task.holds(columns(-1, 0))
    assert not task.holds(columns(2, 0))  # bf16 has a column but is not listed


def test_only_linears_whose_option_is_still_listed_count_as_changed() -> None:
    problem = problem_of(LOSSES, target=0.0)
    rules = rules_of(problem, previous=["fp8", "fp4", "bf16", "fp4-fp8-fp8"], max_changes=1)
    task = rules.task()
    assert task.counted.tolist() == [True, True, False, False]
    assert task.holds(columns(0, 1, 1, 1))
    assert task.holds(columns(1, 1, 1, 1))
    assert not task.holds(columns(1, 0, 1, 1))


def test_a_target_missed_by_floating_point_noise_is_reached() -> None:
    task = rules_of(problem_of([[0.0, 1.0]] * 20, target=0.15000000000000002)).task()
    assert task.holds(columns(*[1] * 3, *[0] * 17))
    assert not task.holds(columns(*[1] * 2, *[0] * 18))
