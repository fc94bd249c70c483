"""Policies: who chooses the option of every linear.

    snip                    minimizes the quality loss (the integer program of the paper)
    random, min-abs-err,    order the linears and lower them in turn, each from its option of least
    min-rel-err, norms,     gain to its option of most gain, until the target is reached; a problem
    layer-type, layer-id,   with options per GEMM lets the last linear be lowered in part
    last-blocks
    random-gemm,            order the GEMMs of all linears and lower them in turn
    grads-first
    uniform-OPTION          gives every linear that is not pinned this option; ignores the target

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
from megatron_snip.options import Option
from megatron_snip.planning.constraints import Constraints, Task, by_saving, fixed_columns
from megatron_snip.planning.cost import Ints
from megatron_snip.planning.problem import PlanningProblem, parse_option
from megatron_snip.planning.search import Solution, lower_bound, solve
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import Gemm, natural_key

UNIFORM = "uniform-"
"""Prefix of the policies that give every linear one option."""

KIND_ORDER = ("linear_fc1", "linear_proj", "linear_qkv", "linear_fc2")
"""Order of `layer-type`, the first to be lowered first; other kinds come before all of them. fc2
has the outliers of gated activations and qkv the softmax behind it, so they come last."""


@dataclass(frozen=True, eq=False)
class Request:
    """The input of a policy.

    Attributes:
        constraints: `constraints.checked_task()` resolves them or raises InfeasiblePlanError.
        settings: policy, seed, workers, gap.
        hint: [n], columns of the previous plan (-1 where the table has none), or None.
        deadline: value of `time.monotonic()` at which the solver stops.
    """

    constraints: Constraints
    settings: PlanSettings
    hint: Ints | None
    deadline: float


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
        name: as users write it.
        decide: chooses. It raises InfeasiblePlanError if the constraints cannot be met, and
            UsageError if the problem lacks what the policy needs.
        needs_statistics: whether it compares measured numbers. The plan of other policies depends
            on names, FLOPs and settings only.
        granularity: `any` if it weighs every option that a problem has; `linear` if it orders
            linears; `gemm` if it orders GEMMs, so that a problem must have options per GEMM.
        heeds_target: whether it reaches the efficiency target.
    """

    name: str
    decide: Decide
    needs_statistics: bool
    granularity: Literal["any", "linear", "gemm"]
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
        decide = partial(_uniform, str(parse_option(name.removeprefix(UNIFORM))))
        return Policy(name, decide, False, "linear", heeds_target=False)
    if name not in POLICIES:
        hint = did_you_mean(name, policy_names())
        raise UsageError(f"unknown policy '{name}'{hint}; known: {', '.join(policy_names())}")
    options = () if problem is None else [o for row in problem.linears for o in row.options]
    if POLICIES[name].granularity == "gemm" and options and not any("-" in o for o in options):
        text = "each option has one format for all three; use granularity gemm or another policy"
        raise UsageError(f"policy '{name}' orders GEMMs, and {text}")
    return POLICIES[name]


def lowered_in(order: Order) -> Decide:
    """Return the policy that lowers one linear after the other until the target is reached.

    The target is exceeded by less than one GEMM if the problem has options per GEMM, else by less
    than one linear (per stage, where stages have targets).
    """
    return gemms_lowered_in(
        lambda r, task: [(row, gemm) for row in order(r, task) for gemm in Gemm]
    )


def gemms_lowered_in(order: Callable[[Request, Task], list[Item]]) -> Decide:
    """Return the policy that lowers one GEMM after the other, with the excess of `lowered_in`."""

    def decide(request: Request) -> Solution:
        task = request.constraints.checked_task()
        start = by_saving(task, most=False)
        steps = _steps(task, start, order(request, task))
        return Solution(greedy_fill(task, start, steps), "feasible", lower_bound(task))

    return decide


def _steps(task: Task, start: Ints, items: Iterable[Item]) -> Iterator[tuple[int, int]]:
    """Yield (row, column) for each item; one without an allowed option joins the linear's next."""
    low, columns, gains = by_saving(task, most=True), start.copy(), task.gain_floors[-1].gains
    reached: dict[int, Option] = {}
    for row, gemm in items:
        names = task.table.options(row)
        before = reached.get(row, parse_option(names[start[row]]))
        lowest = parse_option(names[low[row]])
        reached[row] = replace(before, **{gemm.value: lowest[gemm]})
        name = str(reached[row])
        column = names.index(name) if name in names else -1
        allowed = column >= 0 and task.allowed[row, column]
        if allowed and gains[row, column] > gains[row, columns[row]]:
            columns[row] = column
            yield row, column


def greedy_fill(task: Task, start: Ints, steps: Iterable[tuple[int, int]]) -> Ints:
    """Apply steps in order, each only where it is still needed.

    Args:
        task: whose floors must be reached.
        start: [n], columns to start from.
        steps: (row, column) in the policy's order; every step gains.

    Returns:
        [n] columns; they satisfy the task if the steps suffice.
    """
    columns, remaining = start.copy(), list(steps)
    for floors in task.gain_floors:  # those of the stages first
        missing, gains = floors.missing(columns), floors.gains
        steps, remaining = remaining, []
        for row, column in steps:
            group = floors.group[row]
            if missing[group] > 0:
                missing[group] -= gains[row, column] - gains[row, columns[row]]
                columns[row] = column
            else:
                remaining.append((row, column))
    return columns


def _snip(request: Request) -> Solution:
    task, hint = request.constraints.checked_task(), request.hint
    if hint is not None:
        known = (hint >= 0) & (task.table.listed | task.allowed)[task.table.rows, hint]
        hint = hint if known.all() else None
    found = solve(task, request.settings, hint, request.deadline)
    if hint is not None and task.holds(hint) and task.cost_of(hint) <= task.cost_of(found.columns):
        return replace(found, columns=hint)  # ties do not change the plan
    return found


def _random(request: Request, task: Task) -> list[int]:
    return _shuffled(request, range(len(task.table.rows)))


def _random_gemm(request: Request, task: Task) -> list[Item]:
    return _shuffled(request, _items(task))


def _shuffled(request: Request, items: Sequence[T]) -> list[T]:
    # The same at all targets, so that a schedule of targets lowers the same linears again.
    order = np.random.default_rng([request.settings.seed, 0]).permutation(len(items))
    return [items[k] for k in order]


def _items(task: Task) -> list[Item]:
    return [(row, gemm) for row in range(len(task.table.rows)) for gemm in Gemm]


def _by_score(score: str, per_gain: bool = False) -> Order:
    """Order by a score of the option of most gain, the least first, unknown values last."""

    def order(request: Request, task: Task) -> list[int]:
        low, high = by_saving(task, most=True), by_saving(task, most=False)
        rows = np.flatnonzero(low != high)  # others cannot be lowered
        gains = task.gain_floors[-1].gains
        units = gains[rows, low[rows]] - gains[rows, high[rows]] if per_gain else rows >= 0
        scores = [_score(request, score, int(row), int(low[row])) for row in rows]
        ranks = np.argsort(np.array(scores) / units, kind="stable")
        return list(map(int, rows[ranks]))

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
    return _ranked(task, [KIND_ORDER.index(k) if k in KIND_ORDER else -1 for k in kinds])


def _ranked(task: Task, ranks: Sequence[float]) -> list[int]:
    """Return the rows in ascending order of their ranks; equal ones in the model's order."""
    names = task.table.names
    return sorted(range(len(names)), key=lambda row: (ranks[row], natural_key(names[row])))


def _layers(task: Task) -> list[int]:
    """Return each linear's layer; without a layer in its name, its position in the problem."""
    found = [re.search(r"\.layers\.(\d{1,9})\.", name) for name in task.table.names]
    return [int(match[1]) if match else row for row, match in enumerate(found)]


def _layer_id(request: Request, task: Task) -> list[int]:
    """Order from the middle layer outwards, so that the first and last layers come last."""
    layers = _layers(task)
    middle = max(layers) / 2
    return _ranked(task, [abs(layer - middle) for layer in layers])


def _last_blocks(request: Request, task: Task) -> list[int]:
    """Order so that the first two and the last layers come last.

    NVIDIA's rule (arXiv:2509.25149). The last layer stays high the longest, then the
    first, the one before the last, the second, and the others from the end.
    """
    layers = _layers(task)
    last = max(layers)
    from_last = [2 * layer + 1 if layer < 2 else 2 * (last - layer) for layer in layers]
    return _ranked(task, [-rank for rank in from_last])


def _grads_first(request: Request, task: Task) -> list[Item]:
    """Order dgrad and wgrad of all linears before fprop, each from the middle layer outwards."""
    rank = {row: k for k, row in enumerate(_layer_id(request, task))}
    return sorted(_items(task), key=lambda item: (item[1] == Gemm.FPROP, rank[item[0]]))


def _uniform(option: str, request: Request) -> Solution:
    """Fix every linear that is not pinned, as one more pin."""
    constraints, label = request.constraints, f"policy {request.settings.policy}"
    free = np.ones(len(constraints.table.rows), dtype=np.bool_)
    for pinned in constraints.fixed.values():
        free &= pinned < 0
    fixed = {**constraints.fixed, label: fixed_columns(constraints.table, label, free, option)}
    task = replace(constraints, target=0.0, balance="none", fixed=fixed).checked_task()
    only: Ints = task.allowed.argmax(axis=1)
    return Solution(only, "fixed", task.cost_of(only))


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("snip", _snip, True, "any"),
        Policy("random", lowered_in(_random), False, "linear"),
        Policy("random-gemm", gemms_lowered_in(_random_gemm), False, "gemm"),
        Policy("min-abs-err", lowered_in(_by_score("abs_error")), True, "linear"),
        Policy("min-rel-err", lowered_in(_by_score("rel_error")), True, "linear"),
        Policy("layer-type", lowered_in(_layer_type), False, "linear"),
        Policy("layer-id", lowered_in(_layer_id), False, "linear"),
        Policy("last-blocks", lowered_in(_last_blocks), False, "linear"),
        Policy("grads-first", gemms_lowered_in(_grads_first), False, "gemm"),
        Policy("norms", lowered_in(_by_score("norms", per_gain=True)), True, "linear"),
    )
}
"""Every policy by name, except `uniform-OPTION`, which is made from its option."""
