"""The CP-SAT model of a core (the choices that are still open).

A group is a set of linears with equal costs and coefficients. x[g, j] is the number of linears of
group g that take option j:

    minimize   sum cost[g, j] x[g, j]
    s.t.       sum_j x[g, j] = size[g]         for every group g
               sum gain[g, j] x[g, j] >= floor

Most groups hold one linear, and x is Boolean there. CP-SAT works with integers. Gains are integers
already (`option_table.py`); costs are scaled here (`IntegerCosts`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_snip.planning.option_table import Floats, Ints, as_fraction, choose_unit
from megatron_snip.planning.settings import PlanSettings

_COST_SUM = 2**48
_LEAST_TOTAL = 1e-290
"""Costs that differ by less in sum are equal: smaller ones cannot be scaled to integers."""
_MAX_DISTINCT = 64
"""No common unit is sought of more distinct costs than this."""


@dataclass(frozen=True, eq=False)
class Core:
    """The choices that are still open.

    Attributes:
        starts: Where the choices of each of the m linears start, [m + 1]: choices
            starts[i] .. starts[i+1]-1 belong to linear i.
        cost: Cost of every choice, [c].
        gains: Integer gain of every choice, [c].
        floor: The least sum of the chosen gains.
        hint: A choice for each linear to start from, [m] (an index into choices).
    """

    starts: Ints
    cost: Floats
    gains: Ints
    floor: int
    hint: Ints

    def choices(self, linear: int) -> range:
        """Return the choices of a linear."""
        return range(int(self.starts[linear]), int(self.starts[linear + 1]))


@dataclass(frozen=True)
class Effort:
    """Limits of one solve.

    Attributes:
        settings: Threads and seed are used.
        seconds: Wall-clock limit.
        deterministic_s: CP-SAT's deterministic time limit, the same on every machine.
        absolute_gap: The solver stops once the cost is proven to be this close to the best.
    """

    settings: PlanSettings
    seconds: float
    deterministic_s: float
    absolute_gap: float = 0.0


@dataclass(frozen=True, eq=False)
class CoreSolution:
    """The result of CP-SAT.

    Attributes:
        choices: The choice of each linear, [m], or None if no assignment was found.
        bound: Proven lower bound on the cost of every assignment of the core; -inf if unknown,
            +inf if there is provably no assignment.
        proven: Whether `choices` is best up to the scaling error; True also if there is provably no
            assignment.
        deterministic_s: Deterministic seconds used.
    """

    choices: Ints | None
    bound: float
    proven: bool
    deterministic_s: float


def solve_core(core: Core, effort: Effort) -> CoreSolution:
    """Solve a core with CP-SAT."""
    # Not at the top: every rank imports the policies, and only the solver's process solves.
    from ortools.sat.python import cp_model

    # One variable counts equal linears: that removes the symmetry which would keep the solver from
    # proving an optimum among many equal assignments.
    groups = _groups(core)
    costs = _integer_costs(core)
    model = cp_model.CpModel()
    variables: dict[int, Any] = {}
    for members in groups:  # the variables are those of the group's first linear
        num = len(members)
        choices = core.choices(members[0])
        if num == 1:  # Booleans, which CP-SAT handles best
            own = [model.new_bool_var("") for _ in choices]
            model.add_exactly_one(own)
        else:
            own = [model.new_int_var(0, num, "") for _ in choices]
            model.add(cp_model.LinearExpr.sum(own) == num)
        variables |= zip(choices, own, strict=True)

    def weighted(weights: Ints) -> Any:
        """Return the sum of weight times variable, without the terms of weight 0."""
        used = [choice for choice in variables if weights[choice]]
        terms = [variables[choice] for choice in used]
        return cp_model.LinearExpr.weighted_sum(terms, weights[used].tolist())

    model.add(weighted(core.gains) >= core.floor)
    model.minimize(weighted(costs.integers))
    for members in groups:
        hinted = [int(core.hint[linear] - core.starts[linear]) for linear in members]
        for option, choice in enumerate(core.choices(members[0])):
            model.add_hint(variables[choice], hinted.count(option))

    solver = _solver(effort, costs.unit)
    status = solver.solve(model)
    used_s = solver.response_proto.deterministic_time
    if status == cp_model.INFEASIBLE:
        return CoreSolution(None, np.inf, True, used_s)
    bound = costs.base + costs.unit * solver.best_objective_bound - costs.error
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CoreSolution(None, bound if np.isfinite(bound) else -np.inf, False, used_s)
    counts = {choice: solver.value(variable) for choice, variable in variables.items()}
    chosen = _choices(core, groups, counts)
    scaled = costs.base + costs.unit * float(costs.integers[chosen].sum())
    assert abs(scaled - core.cost[chosen].sum()) <= costs.error, (
        "costs differ by more than the bound of the scaling error"
    )
    # CP-SAT also reports OPTIMAL for a search that a gap limit has ended. Costs are integers here:
    # a cost less than 1 above the bound is the least one.
    is_closed = solver.objective_value < solver.best_objective_bound + 1
    proven = status == cp_model.OPTIMAL and is_closed
    return CoreSolution(chosen, bound, proven, used_s)


def _groups(core: Core) -> list[list[int]]:
    """Return the linears in groups of equal ones."""
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for linear in range(len(core.starts) - 1):
        own = slice(int(core.starts[linear]), int(core.starts[linear + 1]))
        key = (core.cost[own].tobytes(), core.gains[own].tobytes())
        groups.setdefault(key, []).append(linear)
    return list(groups.values())


def _choices(core: Core, groups: list[list[int]], counts: dict[int, int]) -> Ints:
    """Give every linear of a group its option; as many as possible take their hinted one."""
    choices = np.full(len(core.starts) - 1, -1, dtype=np.int64)
    for members in groups:
        left = [counts[choice] for choice in core.choices(members[0])]
        waiting = []
        for linear in members:
            hinted = int(core.hint[linear] - core.starts[linear])
            if left[hinted] > 0:
                left[hinted] -= 1
                choices[linear] = core.starts[linear] + hinted
            else:
                waiting.append(linear)
        spare: list[int] = []
        for option, count in enumerate(left):
            spare += [option] * count
        for linear, option in zip(waiting, spare, strict=True):
            choices[linear] = core.starts[linear] + option
    return choices


class IntegerCosts(NamedTuple):
    """Costs as the solver's integers; the least one of every linear is 0.

    The true cost of an assignment is base + unit * (the sum of its integers), up to `error`.
    """

    integers: Ints
    unit: float
    base: float
    error: float


def _integer_costs(core: Core) -> IntegerCosts:
    sizes = np.diff(core.starts)
    least = np.minimum.reduceat(core.cost, core.starts[:-1])
    above = core.cost - np.repeat(least, sizes)
    total = float(np.maximum.reduceat(above, core.starts[:-1]).sum())
    base = float(least.sum())
    rounding = 1e-15 * float(np.abs(core.cost).sum())
    if total < _LEAST_TOTAL:
        zeros = np.zeros(len(above), dtype=np.int64)
        return IntegerCosts(zeros, unit=1.0, base=base, error=rounding + total)
    unit = _common_unit(core.cost)
    error = rounding
    if unit is None:
        unit = total / _COST_SUM
        error += len(sizes) * unit / 2  # each linear's integer is off by half a unit at most
    return IntegerCosts(np.rint(above / unit).astype(np.int64), unit, base, error)


def _common_unit(values: Floats) -> float | None:
    """Return a number that divides all values, if they are few and simple enough."""
    # CP-SAT then has small integers, whose bounds it can round up.
    distinct = np.unique(values)
    if len(distinct) > _MAX_DISTINCT:
        return None
    fractions = [as_fraction(value) for value in distinct.tolist()]
    unit, exact = choose_unit(fractions, max(map(abs, fractions)) * len(values))
    return float(unit) if exact else None


def _solver(effort: Effort, unit: float) -> Any:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = effort.settings.workers
    solver.parameters.random_seed = effort.settings.seed % 2**31  # it takes no larger one
    solver.parameters.max_time_in_seconds = max(effort.seconds, 0.0)
    solver.parameters.max_deterministic_time = effort.deterministic_s
    solver.parameters.absolute_gap_limit = max(effort.absolute_gap / unit, 0.0)
    # The costs are shifted by `base` and scaled, so a gap relative to them means nothing.
    solver.parameters.relative_gap_limit = 0.0
    # OR-Tools 9.15 proves wrong optima if presolve merges at-most-ones with linear rows that have
    # large coefficients (google/or-tools issue 5293). Without the merging, optima are right, and
    # solving is no slower.
    solver.parameters.presolve_inclusion_work_limit = 0
    return solver
