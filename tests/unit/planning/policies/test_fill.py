import numpy as np

from megatron_snip.planning.policies.fill import fill, gentlest, lowest, within_changes
from tests.unit.planning.build import problem_of, rules_of

OPTIONS = ("bf16", "fp8", "fp4-fp8-fp8", "fp4")


def test_the_gentlest_and_the_lowest_option_break_ties_by_loss() -> None:
    problem = problem_of([[0.5, 0.25, 1.0, 2.0], [0.0, None, None, None]], options=OPTIONS)
    task = rules_of(problem, target=0.0).task()
    assert gentlest(task).tolist() == [1, 0]
    assert lowest(task).tolist() == [3, 0]


def test_steps_are_taken_while_something_lacks() -> None:
    problem = problem_of([[0.0, 1.0]] * 6, target=0.5)
    task = rules_of(problem).task()
    start = np.zeros(6, dtype=np.int64)
    steps = [(row, 1) for row in (5, 0, 4, 1, 3, 2)]
    assert fill(task, start, steps).tolist() == [1, 0, 0, 0, 1, 1]
    assert start.sum() == 0


def test_floors_come_before_the_rest() -> None:
    problem = problem_of([[0.0, 1.0]] * 6, target=0.5, stages=[0, 0, 1, 1, 1, 1])
    task = rules_of(problem, pipeline_balance="stage").task()
    start = np.zeros(6, dtype=np.int64)
    columns = fill(task, start, [(row, 1) for row in range(6)])
    assert columns.tolist() == [1, 0, 1, 1, 0, 0]


def test_every_lowering_makes_room_for_a_raising() -> None:
    problem = problem_of([[0.0, 1.0]] * 6, target=0.5)
    previous = ["fp4", "fp4", "fp4", "fp8", "fp8", "fp8"]
    wanted = np.array([0, 0, 0, 1, 1, 1])
    order = [3, 4, 5, 2, 1, 0]
    results = {}
    for limit in range(7):
        task = rules_of(problem, previous, max_changes=limit).task()
        columns = within_changes(task, np.zeros(6, dtype=np.int64), wanted, order)
        assert task.holds(columns)
        results[limit] = columns.tolist()
    assert results[0] == [1, 1, 1, 0, 0, 0]
    assert results[2] == [0, 1, 1, 1, 0, 0]  # 3 is first to be lowered, 0 first to be raised
    assert results[4] == [0, 0, 1, 1, 1, 0]
    assert results[6] == wanted.tolist()


def test_where_the_order_falls_short_the_largest_gains_are_taken() -> None:
    problem = problem_of([[0.0, 1.0]] * 3, target=0.5, flops=[1.0, 1.0, 8.0])
    task = rules_of(problem, ["fp8"] * 3, max_changes=1).task()
    columns = within_changes(task, np.array([0, 0, 0]), np.array([1, 1, 1]), [0, 1, 2])
    assert columns.tolist() == [0, 0, 1]


def walked(
    previous: list[str], wanted: list[int], limit: int, flops: list[float], **more: object
) -> list[int]:
    """Go towards `wanted` in file order, from fp8 (0) and fp4 (1); half the work is to be fp4."""
    count = len(previous)
    problem = problem_of([[0.0, 1.0]] * count, target=0.5, flops=flops)
    task = rules_of(problem, previous, max_changes=limit, **more).task()
    start = np.zeros(count, dtype=np.int64)
    return within_changes(task, start, np.array(wanted), list(range(count))).tolist()


def test_the_largest_gains_are_taken_only_as_far_as_they_are_needed() -> None:
    flops = [1.0, 1.0, 4.0, 1.0, 9.0]  # 8 of 16 are needed; the first two give 2
    assert walked(["fp8"] * 5, [1] * 5, 2, flops) == [0, 0, 0, 0, 1]


def test_a_previous_plan_beyond_the_target_is_raised_as_far_as_changes_allow() -> None:
    wanted = [1, 1, 1, 0, 0, 0]
    assert walked(["fp4"] * 6, wanted, 2, [1.0] * 6) == [1, 1, 1, 1, 0, 0]
    assert walked(["fp4"] * 6, wanted, 3, [1.0] * 6) == wanted


def test_one_lowering_makes_room_for_several_raisings() -> None:
    flops = [3.0, 1.0, 1.0, 1.0]
    before = ["fp8", "fp4", "fp4", "fp4"]
    assert walked(before, [1, 0, 0, 0], 4, flops) == [1, 0, 0, 0]
    assert walked(before, [1, 0, 0, 0], 3, flops) == [1, 1, 0, 0]


def test_linears_that_have_to_change_use_up_no_changes() -> None:
    before = ["bf16", "bf16", "fp4", "fp8"]  # bf16 is not on offer
    assert walked(before, [1, 1, 0, 0], 0, [1.0] * 4) == [1, 0, 1, 0]
    assert walked(before, [1, 1, 0, 0], 1, [1.0] * 4) == [1, 1, 0, 0]
