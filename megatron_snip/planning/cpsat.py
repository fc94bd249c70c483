"""The CP-SAT model of a (reduced) task: one Boolean an option, exactly one a linear.

    minimize   sum cost[i, j] x[i, j]
    s.t.       sum_j x[i, j] = 1                                  for every linear i
               sum coefficient[r, i, j] x[i, j] >= threshold[r]   for every row r

CP-SAT counts in integers. Rows come in integers already (`scaling.py`); costs are scaled here:

    cost is replaced by round((cost - least cost of its linear) / u),  u = (sum of ranges) / 2^48

so that the true cost of an assignment differs from u * (integer cost) + const by at most
`error` = n * u / 2 + the rounding of doubles. The bound that is returned is lowered by `error`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from megatron_snip.planning.table import Floats, Ints

_COST_SUM = 2**48


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
        proven: whether the search ended by itself (`choices` is best up to `error`).
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
    model = cp_model.CpModel()
    count = len(core.starts) - 1
    literals = [model.new_bool_var("") for _ in range(len(core.cost))]
    for i in range(count):
        model.add_exactly_one(literals[core.starts[i] : core.starts[i + 1]])
    for row in core.rows:
        used = np.flatnonzero(row.coefficients)
        terms = cp_model.LinearExpr.weighted_sum(
            [literals[c] for c in used], row.coefficients[used].tolist()
        )
        model.add(terms >= row.threshold)
    costs = _integer_costs(core)
    model.minimize(cp_model.LinearExpr.weighted_sum(literals, costs.integers.tolist()))
    if core.hint is not None:
        hinted = set(core.hint.tolist())
        for c, literal in enumerate(literals):
            model.add_hint(literal, c in hinted)
    solver = _solver(effort, costs.unit)
    status = solver.solve(model)
    work = solver.response_proto.deterministic_time
    if status == cp_model.INFEASIBLE:
        return CoreAnswer(None, np.inf, True, costs.error, work)
    bound = costs.base + costs.unit * solver.best_objective_bound - costs.error
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CoreAnswer(None, bound if np.isfinite(bound) else -np.inf, False, costs.error, work)
    choices = np.flatnonzero([solver.boolean_value(literal) for literal in literals])
    scaled = costs.base + costs.unit * float(costs.integers[choices].sum())
    assert abs(scaled - core.cost[choices].sum()) <= costs.error, "the scaling error was misstated"
    return CoreAnswer(choices, bound, status == cp_model.OPTIMAL, costs.error, work)


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
    unit = total / _COST_SUM
    integers: Ints = np.rint(above / unit).astype(np.int64)
    return _Costs(integers, unit, float(least.sum()), len(sizes) * unit / 2 + rounding)


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
