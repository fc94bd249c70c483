"""Policies: who chooses the option of every linear.

    snip                    minimizes the quality loss (the integer program of the paper)
    random, min-abs-err,    order the linears and lower them in turn, each from its option of least
    min-rel-err, norms,     gain to its option of most gain, until the target is reached; a problem
    layer-type, layer-id,   with options per GEMM lets the last linear be lowered in part
    last-blocks
    random-gemm,            order the GEMMs of all linears and lower them in turn
    grads-first,
    norms-gemm, norms-kinds
    error-threshold         the same; a problem need not have options per GEMM
    uniform-OPTION          gives every linear that is not pinned this option, or the nearest one of
                            no lower precision that it can run; ignores the target

A new policy is an entry in `POLICIES`; most need only an order (`lowered_in`).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from megatron_snip.errors import UsageError, did_you_mean
from megatron_snip.options import BF16, Option, nearest_option
from megatron_snip.planning.constraints import (
    Constraints,
    Task,
    columns_of_least_gain,
    columns_of_most_gain,
    fixed_columns,
)
from megatron_snip.planning.option_table import Ints, Mask, OptionTable
from megatron_snip.planning.problem import SQUARES, PlanningProblem, norms_score, parse_option
from megatron_snip.planning.search import Solution, lower_bound, solve
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import GEMM_OPERANDS, Gemm, natural_key

UNIFORM = "uniform-"
"""Prefix of the policies that give every linear one option."""

KIND_ORDER = ("linear_fc1", "linear_proj", "linear_qkv", "linear_fc2")
"""Order of `layer-type`, the first to be lowered first; other kinds come before all of them. fc2
has the outliers of gated activations and qkv the softmax behind it, so they come last."""


KIND_WEIGHTS = {Gemm.FPROP: 1.0, Gemm.DGRAD: 0.024, Gemm.WGRAD: 0.051}
"""Of `norms-kinds`: what a bound by norms costs in loss, relative to that of an fprop. Fitted to
runs of one model by `python -m benchmarks.compare kinds`, which prints their errors."""


@dataclass(frozen=True, eq=False)
class Request:
    """The input of a policy.

    Attributes:
        constraints: All constraints. `constraints.checked_task()` returns the task that they define
            or raises InfeasiblePlanError.
        settings: Policy, seed, workers and gap are used.
        hint: Columns of the previous plan, [n] (-1 where the table has none), or None.
        deadline: Value of `time.monotonic()` at which the solver stops.
    """

    constraints: Constraints
    settings: PlanSettings
    hint: Ints | None
    deadline: float

    def statistic(self, row: int, name: str) -> float:
        """Return what was measured of a linear; infinite where that was not finite.

        Args:
            row: the linear's row in `constraints.table`.
            name: such as `input_square`; of a format `fp4.input_error_square`. Of tied linears it
                is that of the first.

        Raises:
            UsageError: if the problem does not have it.
        """
        linear = self.constraints.table.problem.linears[row]
        if name not in linear.statistics:
            raise UsageError(
                f"policy '{self.settings.policy}' needs the statistic '{name}' of '{linear.name}', "
                "and the problem has none; use a problem that a run wrote at a refresh, which "
                "measured it"
            )
        value = linear.statistics[name]
        return math.inf if value is None else value


T = TypeVar("T")
Decide = Callable[[Request], Solution]
Order = Callable[[Request, Task], list[int]]
"""The rows of the linears, the first to be lowered first."""
Item = tuple[int, Gemm]
"""A linear's row and one of its GEMMs."""


@dataclass(frozen=True)
class Policy:
    """A way to choose the options.

    Attributes:
        name: The name that users write.
        decide: The function that chooses. It raises InfeasiblePlanError if the constraints cannot
            be met, and UsageError if the problem lacks what the policy needs.
        needs_statistics: Whether it compares measured numbers. The plan of other policies depends
            on names, FLOPs and settings only.
        granularity: `linear` if it orders linears; `gemm` if it orders GEMMs, so that a problem
            must have options per GEMM; `any` if it plans for both.
        heeds_target: Whether it reaches the efficiency target.
    """

    name: str
    decide: Decide
    needs_statistics: bool = False
    granularity: Literal["any", "linear", "gemm"] = "linear"
    heeds_target: bool = True


def policy_names() -> tuple[str, ...]:
    """Return all names, as help texts list them."""
    return (*POLICIES, f"{UNIFORM}OPTION")


def get_policy(name: str, problem: PlanningProblem | None = None) -> Policy:
    """Return the policy called `name`, which can plan for `problem` (if that is given).

    Raises:
        UsageError: if it is unknown (the message lists the known ones), or names an unknown
            format, or orders GEMMs and the problem has no options per GEMM.
    """
    if name.startswith(UNIFORM) and len(name) > len(UNIFORM):
        option = parse_option(name.removeprefix(UNIFORM))
        return Policy(name, partial(_uniform, str(option)), heeds_target=False)
    if name not in POLICIES:
        hint = did_you_mean(name, policy_names())
        raise UsageError(f"unknown policy '{name}'{hint}; known: {', '.join(policy_names())}")
    policy = POLICIES[name]
    if policy.granularity != "gemm" or problem is None:
        return policy
    if not any("-" in option for linear in problem.linears for option in linear.options):
        text = (
            "each option has one format for all three; take another policy, or measure per GEMM "
            "(--snip-granularity gemm)"
        )
        raise UsageError(f"policy '{name}' orders GEMMs, and {text}")
    return policy


def lowered_in(order: Order) -> Decide:
    """Return the policy that lowers one linear after the other until the target is reached.

    The target is exceeded by less than one GEMM if the problem has options per GEMM, else by less
    than one linear (per stage, where stages have targets).
    """

    def gemm_order(request: Request, task: Task) -> list[Item]:
        # A linear's GEMMs follow each other, so at most one linear of a stage is lowered in part.
        return _items(order(request, task))

    return gemms_lowered_in(gemm_order)


def gemms_lowered_in(order: Callable[[Request, Task], list[Item]]) -> Decide:
    """Return the policy that lowers one GEMM after the other, with the excess of `lowered_in`."""

    def decide(request: Request) -> Solution:
        task = request.constraints.checked_task()
        start = columns_of_least_gain(task)
        steps = _steps(task, start, order(request, task))
        # Such policies do not minimize the loss; the bound shows how much `snip` can win at most.
        return Solution(apply_needed(task, start, steps), "feasible", lower_bound(task))

    return decide


def _steps(task: Task, start: Ints, items: Iterable[Item]) -> Iterator[tuple[int, int]]:
    """Yield (row, column) for each item: the linear's column once this GEMM is lowered as well.

    Where no allowed option has exactly the GEMMs lowered so far, there is no step yet: the linear's
    next item may have one. So a linear whose options are `fp8` and `fp4` makes one step, when the
    last of its three GEMMs is lowered.
    """
    lowest = columns_of_most_gain(task)
    gains = task.table.integer_gains.coefficients
    columns = start.copy()
    lowered: dict[int, Option] = {}
    for row, gemm in items:
        names = task.table.options(row)
        before = lowered.get(row, parse_option(names[start[row]]))
        target = parse_option(names[lowest[row]])
        lowered[row] = replace(before, **{gemm.value: target[gemm]})
        column = {name: k for k, name in enumerate(names)}.get(str(lowered[row]))
        if column is None:
            continue
        # An option with more GEMMs lowered need not gain: it may be no faster (cost `time`).
        if task.allowed[row, column] and gains[row, column] > gains[row, columns[row]]:
            columns[row] = column
            yield row, column


def apply_needed(task: Task, start: Ints, steps: Iterable[tuple[int, int]]) -> Ints:
    """Apply steps in order, each only where a floor still needs it.

    Args:
        task: The task; its floors must be reached.
        start: The columns to start from, [n].
        steps: (row, column) in the policy's order; every step gains.

    Returns:
        [n] columns; they satisfy the task if the steps suffice.
    """
    columns = start.copy()
    floors = task.integer_floors
    missing = floors.missing(columns)
    for row, column in steps:
        group = floors.group[row]
        if missing[group] > 0:  # another stage may still lack something: no early end
            missing[group] -= floors.gains[row, column] - floors.gains[row, columns[row]]
            columns[row] = column
    return columns


def _snip(request: Request) -> Solution:
    task = request.constraints.checked_task()
    hint = request.hint
    if hint is not None:
        is_choice = task.table.listed | task.allowed
        is_known = (hint >= 0) & is_choice[task.table.rows, hint]
        if not is_known.all():  # the previous plan has an option that the problem does not list
            hint = None
    found = solve(task, request.settings, hint, request.deadline)
    if hint is None or not task.holds(hint):
        return found
    if task.cost_of(hint) <= task.cost_of(found.columns):
        return replace(found, columns=hint)  # an equal plan is no reason to change a linear
    return found


def _random(request: Request, task: Task) -> list[int]:
    return _shuffled(request, range(len(task.table.rows)))


def _random_gemm(request: Request, task: Task) -> list[Item]:
    return _shuffled(request, _items(range(len(task.table.rows))))


def _shuffled(request: Request, items: Sequence[T]) -> list[T]:
    # The same at all targets, so that a target schedule lowers the same linears again.
    order = np.random.default_rng([request.settings.seed, 0]).permutation(len(items))
    return [items[k] for k in order]


def _items(rows: Iterable[int]) -> list[Item]:
    return [(row, gemm) for row in rows for gemm in Gemm]


def _by_score(score: str, per_gain: bool = False) -> Order:
    """Order by a score of the option of most gain, the least first, unknown values last.

    Args:
        score: Name of the score in `OptionCost.scores`.
        per_gain: Divide the score by the gain of lowering the linear.
    """

    def order(request: Request, task: Task) -> list[int]:
        lowest = columns_of_most_gain(task)
        highest = columns_of_least_gain(task)
        rows = np.flatnonzero(lowest != highest)  # others cannot be lowered
        scores = np.array([_score(request, score, int(row), int(lowest[row])) for row in rows])
        if per_gain:
            gains = task.table.integer_gains.coefficients
            scores = scores / (gains[rows, lowest[rows]] - gains[rows, highest[rows]])
        ranks = np.argsort(scores, kind="stable")
        return [int(row) for row in rows[ranks]]

    return order


def _score(request: Request, score: str, row: int, column: int) -> float:
    linear = request.constraints.table.problem.linears[row]
    name, cost = list(linear.options.items())[column]
    if score not in cost.scores:
        raise UsageError(
            f"policy '{request.settings.policy}' needs the score '{score}' of option '{name}' for "
            f"'{linear.name}', and the problem has none; use a problem that a run wrote at a "
            "refresh"
        )
    value = cost.scores[score]
    return math.inf if value is None else value


def _layer_type(request: Request, task: Task) -> list[int]:
    """Order by kind of linear (`KIND_ORDER`), then by position in the model."""
    kinds = [name.rsplit(".", 1)[-1] for name in task.table.names]
    ranks = [KIND_ORDER.index(kind) if kind in KIND_ORDER else -1 for kind in kinds]
    return _ranked(task, ranks)


def _ranked(task: Task, ranks: Sequence[float]) -> list[int]:
    """Return the rows in ascending order of their ranks; equal ones in the model's order."""
    names = task.table.names
    return sorted(range(len(names)), key=lambda row: (ranks[row], natural_key(names[row])))


def _layers(task: Task) -> list[int]:
    """Return each linear's layer; without a layer in its name, its position in the problem."""
    layers = []
    for row, name in enumerate(task.table.names):
        match = re.search(r"\.layers\.(\d{1,9})\.", name)
        layers.append(int(match[1]) if match else row)
    return layers


def _layer_id(request: Request, task: Task) -> list[int]:
    """Order from the middle layer outwards, so that the first and last layers come last."""
    layers = _layers(task)
    middle = max(layers) / 2
    return _ranked(task, [abs(layer - middle) for layer in layers])


def _last_blocks(request: Request, task: Task) -> list[int]:
    """Order from the third layer towards the last; the first two layers come near the end.

    NVIDIA's rule (arXiv:2509.25149). The order ends with the second layer, the one before the last,
    the first, and the last.
    """
    layers = _layers(task)
    last = max(layers)
    # Even places count from the last layer: 0, 2, 4, ... Layers 0 and 1 have the places 1 and 3.
    places = [2 * layer + 1 if layer < 2 else 2 * (last - layer) for layer in layers]
    return _ranked(task, [-place for place in places])


def _grads_first(request: Request, task: Task) -> list[Item]:
    """Order dgrad and wgrad of all linears before fprop, each from the middle layer outwards."""
    rank = {row: k for k, row in enumerate(_layer_id(request, task))}
    items = _items(range(len(task.table.rows)))
    return sorted(items, key=lambda item: (item[1] == Gemm.FPROP, rank[item[0]]))


def _norms_gemm(request: Request, task: Task) -> list[Item]:
    """Order dgrad and wgrad of all linears before fprop, each by their bounds by norms."""
    bounds = _norms_per_gain(request, task)
    return sorted(bounds, key=lambda item: (item[1] == Gemm.FPROP, bounds[item]))


def _norms_kinds(request: Request, task: Task) -> list[Item]:
    """Order all GEMMs by their bounds by norms, weighted by kind of GEMM (`KIND_WEIGHTS`)."""
    bounds = _norms_per_gain(request, task)
    return sorted(bounds, key=lambda item: KIND_WEIGHTS[item[1]] * bounds[item])


def _norms_per_gain(request: Request, task: Task) -> dict[Item, float]:
    """Return each GEMM's bound by norms in the option of most gain, by the gain of its linear.

    The three GEMMs of a linear have equal FLOPs, so a third of the gain is that of one.
    """
    lowest = columns_of_most_gain(task)
    highest = columns_of_least_gain(task)
    gains = task.table.integer_gains.coefficients
    bounds = {}
    for row in np.flatnonzero(lowest != highest).tolist():  # others cannot be lowered
        gain = float(gains[row, lowest[row]] - gains[row, highest[row]])
        for gemm in Gemm:
            bounds[row, gemm] = _score(request, norms_score(gemm), row, int(lowest[row])) / gain
    return bounds


def _error_threshold(request: Request, task: Task) -> list[Item]:
    """Order GEMMs by the larger relative error of their two operands.

    So the GEMMs below a threshold are lowered, and the threshold is that which the target needs.
    Where a linear has one format, its three operands must be below it. Mixture of Representations
    (arXiv:2512.22804) fixes the threshold, and judges each tensor in each step.
    """
    lowest = columns_of_most_gain(task)
    highest = columns_of_least_gain(task)
    errors = {}
    for row in np.flatnonzero(lowest != highest).tolist():  # others cannot be lowered
        option = parse_option(task.table.options(row)[lowest[row]])
        for gemm in Gemm:
            errors[row, gemm] = 0.0
            if option[gemm] == str(BF16):
                continue
            for operand in GEMM_OPERANDS[gemm]:
                error, own = SQUARES[operand]
                error_square = request.statistic(row, f"{option[gemm]}.{error}")
                # A tensor of zeros has no error either: 0 / 1.
                relative = error_square / (request.statistic(row, own) or 1.0)
                errors[row, gemm] = max(errors[row, gemm], relative)
    return sorted(errors, key=errors.__getitem__)


def _uniform(option: str, request: Request) -> Solution:
    """Fix every linear that is not pinned, as one more pin."""
    constraints = request.constraints
    label = f"policy {request.settings.policy}"
    is_free = np.ones(len(constraints.table.rows), dtype=np.bool_)
    for pinned in constraints.fixed.values():
        is_free &= pinned < 0
    fixed = {
        **constraints.fixed,
        label: _uniform_columns(constraints.table, label, is_free, option),
    }
    task = replace(constraints, target=0.0, balance="none", fixed=fixed).checked_task()
    columns: Ints = task.allowed.argmax(axis=1)  # one column of each linear is allowed
    return Solution(columns, "fixed", task.cost_of(columns))


def _uniform_columns(table: OptionTable, label: str, rows: Mask, option: str) -> Ints:
    """Fix rows ([n] mask) to an option, or to the nearest one of no lower precision that they have.

    Raises:
        UsageError: if no row has the option.
    """
    has_option = table.columns_of([option] * len(rows)) >= 0
    if not has_option.any():  # no linear has it: a mistake in the policy's name, reported there
        return fixed_columns(table, label, rows, option)
    options = [option] * len(rows)
    for row in np.flatnonzero(~has_option).tolist():
        own = map(parse_option, table.options(row))
        options[row] = str(nearest_option(parse_option(option), own))
    return np.where(rows, table.columns_of(options), -1)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("snip", _snip, needs_statistics=True, granularity="any"),
        Policy("random", lowered_in(_random)),
        Policy("random-gemm", gemms_lowered_in(_random_gemm), granularity="gemm"),
        Policy("min-abs-err", lowered_in(_by_score("abs_error")), needs_statistics=True),
        Policy("min-rel-err", lowered_in(_by_score("rel_error")), needs_statistics=True),
        Policy("layer-type", lowered_in(_layer_type)),
        Policy("layer-id", lowered_in(_layer_id)),
        Policy("last-blocks", lowered_in(_last_blocks)),
        Policy("grads-first", gemms_lowered_in(_grads_first), granularity="gemm"),
        Policy("norms", lowered_in(_by_score("norms", per_gain=True)), needs_statistics=True),
        Policy(
            "norms-gemm",
            gemms_lowered_in(_norms_gemm),
            needs_statistics=True,
            granularity="gemm",
        ),
        Policy(
            "norms-kinds",
            gemms_lowered_in(_norms_kinds),
            needs_statistics=True,
            granularity="gemm",
        ),
        Policy(
            "error-threshold",
            gemms_lowered_in(_error_threshold),
            needs_statistics=True,
            granularity="any",
        ),
    )
}
"""Every policy by name, except `uniform-OPTION`, which is made from its option."""
