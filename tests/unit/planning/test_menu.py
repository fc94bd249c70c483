import itertools

import numpy as np

from megatron_snip.planning.menu import make_menu, stage_menus
from megatron_snip.planning.reach import most_gain
from tests.unit.planning.build import problem_of, rules_of
from tests.unit.planning.test_reach import SEEDS, assignments, rules

OPTIONS = ("bf16", "fp8", "fp4-fp8-fp8", "fp4")


def test_superfluous_choices_are_dropped() -> None:
    losses = [
        [0.0, 1.0, 2.0, 3.0],  # fp8 saves no more than bf16 and loses more
        [1.0, 1.0, 5.0, 4.0],  # the tie keeps the first; fp4 beats the mixture
        [9.0, 8.0, 7.0, 6.0],  # fp4 beats everything
    ]
    menu = make_menu(rules_of(problem_of(losses, options=OPTIONS)).task())
    kept = np.isfinite(menu.cost)[:, :4].tolist()
    assert kept == [
        [True, False, True, True],
        [True, False, False, True],
        [False, False, False, True],
    ]


def test_the_previous_option_stays_while_changes_are_limited() -> None:
    problem = problem_of([[9.0, 8.0, 7.0, 6.0]], options=OPTIONS, target=0.0)
    task = rules_of(problem, ["fp8"], max_changes=0).task()
    menu = make_menu(task)
    assert np.isfinite(menu.cost)[0, :4].tolist() == [False, True, False, True]
    assert menu.holds(np.array([1]))
    assert not menu.holds(np.array([3]))


def test_dropping_choices_never_loses_the_best_assignment() -> None:
    compared = 0
    for seed, balance in itertools.product(SEEDS[::3], ("none", "stage")):
        task = rules(seed, balance).task()
        good = [c for c in assignments(task.table) if task.holds(c)]
        if not good:
            continue
        menu = make_menu(task)
        losses = [task.table.quality_loss(c) for c in good]
        held = [c for c in good if menu.holds(c)]
        assert min(map(menu.loss, held)) == min(losses), seed
        for columns in good:
            replaced = menu.without_superfluous(columns)
            assert menu.holds(replaced), seed
            assert menu.loss(replaced) <= task.table.quality_loss(columns) + 1e-12, seed
        compared += 1
    assert compared > 10


def test_stage_menus_split_floors_and_keep_the_common_lines_apart() -> None:
    problem = problem_of([[0.0, 1.0]] * 5, target=0.5, stages=[0, 0, 2, 2, 2])
    menu = make_menu(rules_of(problem, pipeline_balance="stage").task())
    assert len(menu.floor_lines) == 2
    assert menu.common_lines == ()
    parts = stage_menus(menu)
    assert [part.linears.tolist() for part in parts] == [[0, 1], [2, 3, 4]]
    assert [part.lines[0].threshold for part in parts] == [1, 2]
    limited = rules_of(problem, ["fp8"] * 5, pipeline_balance="stage", max_changes=4).task()
    assert len(make_menu(limited).common_lines) == 1


def test_a_menu_accepts_what_its_task_accepts() -> None:
    for seed in SEEDS[:40]:
        task = rules(seed, "stage").task()
        if most_gain(task) is None:
            continue
        menu = make_menu(task)
        for columns in assignments(task.table):
            if np.isfinite(menu.cost[menu.positions, columns]).all():
                assert menu.holds(columns) == task.holds(columns), seed
