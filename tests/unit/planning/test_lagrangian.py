"""The dual against the linear relaxation solved by HiGHS."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize

from megatron_snip.planning.constraints import max_saving_assignment
from megatron_snip.planning.lagrangian import ChoiceSet, make_choices, maximize
from tests.unit.planning.build import constraints_of
from tests.unit.planning.instances import random_instance


def choice_sets(seed: int, balance: str) -> list[ChoiceSet]:
    problem = random_instance(seed, num_linears=30).problem
    constraints = constraints_of(problem, pipeline_balance=balance)
    if max_saving_assignment(constraints.task()) is None:
        return []
    task = constraints.checked_task()
    sets = make_choices(task)
    if balance == "bottleneck":  # stages and an overall row at once
        share = 0.5 * (1 + task.table.efficiency(max_saving_assignment(task)))
        coupled = replace(task, least=share * task.table.weight)
        sets += make_choices(coupled) if max_saving_assignment(coupled) is not None else []
    return sets


def relaxation(choices: ChoiceSet) -> float:
    """Return the optimum of a choice set's linear relaxation."""
    rows, columns = np.nonzero(np.isfinite(choices.cost))
    loss = choices.cost[rows, columns]
    scale = np.abs(loss).max() or 1.0
    owner = (rows[None, :] == np.arange(len(choices.cost))[:, None]).astype(float)
    lines, thresholds = [], []
    for floors in choices.budgets:
        size = max(1.0, float(floors.gains.max()))
        for p, least in enumerate(floors.least):
            own = np.where(floors.group[rows] == p, floors.gains[rows, columns], 0)
            lines.append(-own / size)
            thresholds.append(-least / size)
    result = scipy.optimize.linprog(
        loss / scale,
        A_ub=np.array(lines),
        b_ub=np.array(thresholds),
        A_eq=owner,
        b_eq=np.ones(len(choices.cost)),
        method="highs",
    )
    assert result.status == 0, result.message
    return float(result.fun) * scale


@pytest.mark.parametrize("balance", ["none", "stage", "bottleneck"])
def test_the_maximum_is_the_optimum_of_the_linear_relaxation(balance: str) -> None:
    compared = 0
    for seed in range(30):
        for choices in choice_sets(seed, balance):
            size = float(np.nan_to_num(choices.cost, posinf=0.0).max(axis=1).sum())
            wanted = relaxation(choices)
            assert maximize(choices).bound == pytest.approx(wanted, abs=1e-7 * size), seed
            compared += 1
    assert compared >= 5
