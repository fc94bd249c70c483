"""CP-SAT on a core against enumeration, and the dual against the linear relaxation of HiGHS."""

import itertools

import numpy as np
import pytest
import scipy.optimize

from megatron_snip.planning.constraints import assignment_of_most_gain
from megatron_snip.planning.cpsat import Core, Effort, solve_core
from megatron_snip.planning.lagrangian import ChoiceSet, make_choices, maximize
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import constraints_of
from tests.unit.planning.instances import random_instance

EFFORT = Effort(PlanSettings(seed=2**32 - 1), seconds=20.0, deterministic_s=5.0)
"""With the largest seed that Megatron takes, which is larger than CP-SAT's."""


def core(random: np.random.Generator, bits: float, spread: float) -> Core:
    sizes = random.integers(1, 5, size=random.integers(1, 7))
    starts = np.concatenate(([0], np.cumsum(sizes)))
    count = int(starts[-1])
    gains = random.integers(0, 2**bits, count)
    most = np.maximum.reduceat(gains, starts[:-1]).sum()
    floor = int(most * random.uniform(0.2, 1.1))
    cost = 10.0 ** random.uniform(-spread, spread, count)
    return Core(starts, cost, gains, floor, starts[:-1])


def best(core_: Core) -> float:
    ranges = itertools.pairwise(core_.starts.tolist())
    losses = [
        core_.cost[list(x)].sum()
        for x in itertools.product(*(range(a, b) for a, b in ranges))
        if core_.gains[list(x)].sum() >= core_.floor
    ]
    return min(losses, default=np.inf)


@pytest.mark.parametrize(("bits", "spread"), [(4, 0.3), (20, 1.0), (38, 6.0), (43, 3.0)])
def test_the_proven_optimum_is_that_of_enumeration(bits: int, spread: float) -> None:
    random = np.random.default_rng(bits)
    for _ in range(60):
        given = core(random, bits, spread)
        answer = solve_core(given, EFFORT)
        wanted = best(given)
        assert answer.proven
        if np.isinf(wanted):
            assert answer.choices is None
            assert answer.bound == np.inf
            continue
        found, error = given.cost[answer.choices].sum(), 2e-12 * given.cost.sum()
        assert found == pytest.approx(wanted, rel=1e-12, abs=error)
        assert found - error <= answer.bound <= wanted


def test_large_coefficients_do_not_break_the_proof() -> None:
    """A core for which presolve with its defaults "proves" 7.6 instead of 7.5 in ortools 9.15."""
    starts = np.array([0, 2, 4, 6, 10, 13, 15, 18])
    cost = np.array(
        [
            *(0, 22083644735198, 0, 28821534469983, 772149, 0, 58473772358682, 9778377145436),
            *(53412173, 0, 7223716, 0, 171885448622555, 965651495, 0, 209610100594, 0),
            122650127971,
        ],
        dtype=np.float64,
    )
    gains = np.array(
        [
            *(4072436012564, 5662753162987, 3620745567602, 15599783590043, 6005226324107),
            *(4260861462085, 9475888638707, 8083740696714, 5248429330831, 3285405250768),
            *(2311371163300, 17717081731653, 18009057952510, 4957116971254, 12836493184336),
            *(2773901354564, 2417402113248, 2077444140060),
        ]
    )
    given = Core(starts, cost, gains, 58673655320091, starts[:-1])
    answer = solve_core(given, EFFORT)
    assert answer.proven
    assert cost[answer.choices].sum() == best(given) == 28821534469983


def test_equal_linears_are_counted_and_follow_the_hint() -> None:
    # 300 linears of three options each in convex position: too symmetric for one variable each.
    gains, costs = np.tile([0, 1, 3], 300), np.tile([0.0, 1 / 9, 1.0], 300)
    random = np.random.default_rng(0)
    hint = np.arange(300) * 3 + random.integers(0, 3, 300)
    given = Core(np.arange(0, 901, 3), costs, gains, 630, hint)
    answer = solve_core(given, EFFORT)
    assert answer.proven
    # 630 = 3 a + b with a + b <= 300 and a + b / 9 least: a = 165, b = 135.
    assert costs[answer.choices].sum() == pytest.approx(165 + 135 / 9)
    assert gains[answer.choices].sum() >= 630
    taken, hinted = answer.choices % 3, hint % 3
    for option in range(3):
        both = ((taken == option) & (hinted == option)).sum()
        assert both == min((taken == option).sum(), (hinted == option).sum())


def test_stopping_at_a_gap_is_no_proof_of_the_optimum() -> None:
    random, starts = np.random.default_rng(4), np.arange(0, 121, 2)
    gains, cost = np.zeros(120, dtype=np.int64), np.zeros(120)
    gains[1::2] = random.integers(2**20, 2**21, 60)
    cost[1::2] = gains[1::2] * random.uniform(0.99, 1.01, 60)
    given = Core(starts, cost, gains, 2**25, starts[:-1])
    rough = solve_core(given, Effort(PlanSettings(), 20.0, 5.0, absolute_gap=0.1 * 2**25))
    loss = cost[rough.choices].sum()
    assert 1e-9 * loss < loss - rough.bound <= 0.1 * 2**25 * (1 + 1e-9)
    assert not rough.proven


def choice_sets(seed: int, balance: str) -> list[ChoiceSet]:
    problem = random_instance(seed, num_linears=30).problem
    constraints = constraints_of(problem, pipeline_balance=balance)
    if assignment_of_most_gain(constraints.task()) is None:
        return []
    return make_choices(constraints.checked_task())


def relaxation(choices: ChoiceSet) -> float:
    """Return the optimum of a choice set's linear relaxation."""
    rows, columns = np.nonzero(np.isfinite(choices.cost))
    loss = choices.cost[rows, columns]
    scale = np.abs(loss).max() or 1.0
    owner = (rows[None, :] == np.arange(len(choices.cost))[:, None]).astype(float)
    gains = choices.gains[rows, columns]
    size = max(1.0, float(choices.gains.max()))
    result = scipy.optimize.linprog(
        loss / scale,
        A_ub=-gains[None, :] / size,
        b_ub=np.array([-choices.floor / size]),
        A_eq=owner,
        b_eq=np.ones(len(choices.cost)),
        method="highs",
    )
    assert result.status == 0, result.message
    return float(result.fun) * scale


@pytest.mark.parametrize("balance", ["none", "stage"])
def test_the_maximum_is_the_optimum_of_the_linear_relaxation(balance: str) -> None:
    compared = 0
    for seed in range(30):
        for choices in choice_sets(seed, balance):
            size = float(np.nan_to_num(choices.cost, posinf=0.0).max(axis=1).sum())
            wanted = relaxation(choices)
            assert maximize(choices).bound == pytest.approx(wanted, abs=1e-7 * size), seed
            compared += 1
    assert compared >= 5
