"""The CP-SAT model of a (reduced) task: how many linears of a group of equal ones take each option.

    minimize   sum cost[g, j] x[g, j]
    s.t.       sum_j x[g, j] = size[g]                            for every group g
               sum coefficient[r, g, j] x[g, j] >= threshold[r]   for every row r

Linears are equal if their costs and coefficients are. Most groups hold one linear, and x is Boolean
there. Counting equal linears instead of naming them takes away the symmetry that would otherwise
keep the solver from ever proving an optimum among ties.

CP-SAT counts in integers. Rows come in integers already (`scaling.py`); costs are scaled here:

    cost is replaced by round((cost - least cost of its linear) / u),  u = (sum of ranges) / 2^48

so that the true cost of an assignment differs from u * (integer cost) + const by at most
`error` = n * u / 2 + the rounding of doubles. Where a unit divides all costs, it is u, and only the
rounding of doubles is left. The bound that is returned is lowered by `error`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from megatron_snip.planning.cost import as_fraction
from megatron_snip.planning.scaling import choose_scale
from megatron_snip.planning.table import Floats, Ints

_COST_SUM = 2**48
_MAX_DISTINCT = 64


@dataclass(frozen=True, eq=False)
class CoreRow:
    """One linear constraint over all choices.

    Attributes:
        coefficients: by choice, int64; choices are numbered as in `Core`.
        threshold: least sum.
    """

    coefficients: Ints
    threshold: int


@dataclass(frozen=True, eq=False)
class Core:
    """The choices that are still open.

    Attributes:
        starts: [m + 1], choices starts[i] .. starts[i+1]-1 belong to linear i.
        cost: [c], of every choice.
        rows: constraints.
        hint: [m], a choice for each linear to start from (an index into choices), or None.
    """

    starts: Ints
    cost: Floats
    rows: tuple[CoreRow, ...]
    hint: Ints | None


@dataclass(frozen=True)
class Effort:
    """How much work a solve may be.

    Attributes:
        seconds: wall-clock limit.
        deterministic_s: CP-SAT's deterministic time limit, the same on every machine.
        workers: threads.
        seed: of the search.
        absolute_gap: stop once the cost is proven to be this close to the best.
    """

    seconds: float
    deterministic_s: float
    workers: int
    seed: int
    absolute_gap: float = 0.0


@dataclass(frozen=True, eq=False)
class CoreAnswer:
    """What CP-SAT found.

    Attributes:
        choices: [m], the chosen choice of each linear, or None if none was found.
        bound: proven lower bound on the cost of every assignment of the core; -inf if none,
            +inf if there is provably no assignment.
        proven: whether `choices` is best up to `error`.
        error: the scaling error that `bound` already includes.
        work: deterministic seconds used.
    """

    choices: NDArray[np.int64] | None
    bound: float
    proven: bool
    error: float
    work: float


def solve_core(core: Core, effort: Effort) -> CoreAnswer:
    """Solve a core with CP-SAT."""
    groups, costs = _groups(core), _integer_costs(core)
    model = cp_model.CpModel()
    # The group's representative stands for all: its choices are counted.
    counted = np.concatenate([np.arange(*_range(core, members[0])) for members in groups])
    variables: dict[int, cp_model.IntVar] = {}
    for members in groups:
        own = [_variable(model, len(members)) for _ in range(*_range(core, members[0]))]
        variables |= zip(range(*_range(core, members[0])), own, strict=True)
        if len(members) == 1:
            model.add_exactly_one(own)
        else:
            model.add(cp_model.LinearExpr.sum(own) == len(members))
    for row in core.rows:
        used = counted[row.coefficients[counted] != 0].tolist()
        terms = [variables[c] for c in used]
        weights = row.coefficients[used].tolist()
        model.add(cp_model.LinearExpr.weighted_sum(terms, weights) >= row.threshold)
    every, integers = [variables[c] for c in counted.tolist()], costs.integers[counted].tolist()
    model.minimize(cp_model.LinearExpr.weighted_sum(every, integers))
    _add_hint(model, core, groups, variables)
    solver = _solver(effort, costs.unit)
    status = solver.solve(model)
    work = solver.response_proto.deterministic_time
    if status == cp_model.INFEASIBLE:
        return CoreAnswer(None, np.inf, True, costs.error, work)
    bound = costs.base + costs.unit * solver.best_objective_bound - costs.error
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CoreAnswer(None, bound if np.isfinite(bound) else -np.inf, False, costs.error, work)
    choices = _choices(core, groups, {c: solver.value(v) for c, v in variables.items()})
    scaled = costs.base + costs.unit * float(costs.integers[choices].sum())
    assert abs(scaled - core.cost[choices].sum()) <= costs.error, "the scaling error was misstated"
    # A search that a gap limit ends is called optimal, too.
    proven = status == cp_model.OPTIMAL and solver.objective_value < solver.best_objective_bound + 1
    return CoreAnswer(choices, bound, proven, costs.error, work)


def _range(core: Core, linear: int) -> tuple[int, int]:
    return int(core.starts[linear]), int(core.starts[linear + 1])


def _variable(model: cp_model.CpModel, size: int) -> cp_model.IntVar:
    return model.new_bool_var("") if size == 1 else model.new_int_var(0, size, "")


def _groups(core: Core) -> list[list[int]]:
    """Return the linears in groups of equal ones."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for linear in range(len(core.starts) - 1):
        own = slice(*_range(core, linear))
        key = (core.cost[own].tobytes(), *(row.coefficients[own].tobytes() for row in core.rows))
        groups.setdefault(key, []).append(linear)
    return list(groups.values())


def _add_hint(
    model: cp_model.CpModel,
    core: Core,
    groups: list[list[int]],
    variables: dict[int, cp_model.IntVar],
) -> None:
    if core.hint is None:
        return
    for members in groups:
        start, end = _range(core, members[0])
        taken = [int(core.hint[linear] - core.starts[linear]) for linear in members]
        for c in range(start, end):
            model.add_hint(variables[c], taken.count(c - start))


def _choices(core: Core, groups: list[list[int]], counts: dict[int, int]) -> Ints:
    """Give every linear of a group its option; those that can keep the hint's do."""
    choices = np.full(len(core.starts) - 1, -1, dtype=np.int64)
    for members in groups:
        start, end = _range(core, members[0])
        left = {c - start: counts[c] for c in range(start, end)}
        waiting = []
        for linear in members:
            hinted = -1 if core.hint is None else int(core.hint[linear] - core.starts[linear])
            if left.get(hinted, 0) > 0:
                left[hinted] -= 1
                choices[linear] = core.starts[linear] + hinted
            else:
                waiting.append(linear)
        spare = [option for option, count in left.items() for _ in range(count)]
        for linear, option in zip(waiting, spare, strict=True):
            choices[linear] = core.starts[linear] + option
    return choices


@dataclass(frozen=True, eq=False)
class _Costs:
    """Integer costs, the least of every linear being 0.

    The true cost of an assignment is base + unit * (its integers' sum), up to `error`.
    """

    integers: Ints
    unit: float
    base: float
    error: float


def _integer_costs(core: Core) -> _Costs:
    sizes = np.diff(core.starts)
    least = np.minimum.reduceat(core.cost, core.starts[:-1])
    above = core.cost - np.repeat(least, sizes)
    total = float(np.maximum.reduceat(above, core.starts[:-1]).sum())
    rounding = 1e-15 * float(np.abs(core.cost).sum())
    if total == 0.0:
        return _Costs(np.zeros(len(above), dtype=np.int64), 1.0, float(least.sum()), rounding)
    unit = _common_unit(core.cost)
    exact = unit is not None
    unit = unit if unit is not None else total / _COST_SUM
    integers: Ints = np.rint(above / unit).astype(np.int64)
    error = rounding if exact else len(sizes) * unit / 2 + rounding
    return _Costs(integers, unit, float(least.sum()), error)


def _common_unit(values: Floats) -> float | None:
    """Return a number that all values are whole multiples of, if they are few and simple enough.

    Counts and small fractions are; then CP-SAT sees small integers, whose bounds it can round up.
    """
    distinct = np.unique(values)
    if len(distinct) > _MAX_DISTINCT:
        return None
    fractions = [as_fraction(value) for value in distinct.tolist()]
    largest = max(map(abs, fractions)) * len(values)
    scale = choose_scale(fractions, largest)
    return float(scale.unit) if scale.exact else None


def _solver(effort: Effort, unit: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = effort.workers
    solver.parameters.random_seed = effort.seed
    solver.parameters.max_time_in_seconds = max(effort.seconds, 0.0)
    solver.parameters.max_deterministic_time = effort.deterministic_s
    solver.parameters.absolute_gap_limit = max(effort.absolute_gap / unit, 0.0)
    solver.parameters.relative_gap_limit = 0.0
    # Presolve merging at-most-ones with linear rows proves wrong optima in 9.15 when coefficients
    # are large (google/or-tools issue 5293); without it the right ones, and no slower.
    solver.parameters.presolve_inclusion_work_limit = 0
    return solver
