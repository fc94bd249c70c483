"""Baselines that lower whole linears in some order: random, by local error, by kind, by depth.

Each names an order; `fill.py` holds the budget arithmetic. A linear goes from its gentlest option
to its lowest one at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_snip.planning.policies.fill import fill, gentlest, lowest, within_changes
from megatron_snip.planning.policies.policy import Decision, Request, metric_of
from megatron_snip.planning.solve import lower_bound
from megatron_snip.planning.table import Table
from megatron_snip.planning.task import Task
from megatron_snip.types import natural_key, split_linear_name

KIND_ORDER = ("linear_fc1", "linear_proj", "linear_qkv", "linear_fc2")
"""Kinds of linears, the first to be lowered first. fc2 sees the outliers that gated activations
make and qkv feeds the softmax, so they are protected longest; unknown kinds come first."""

Order = Callable[[Request, Task], list[int]]


class OrderedPolicy:
    """Lowers linears in a given order until the target is reached."""

    wants_bf16 = False
    minimizes_loss = False
    heeds_target = True

    def __init__(self, name: str, order: Order) -> None:
        self.name = name
        self._order = order

    def decide(self, request: Request) -> Decision:
        """Lower as many linears as the rules ask for, in this policy's order; see `Policy`."""
        task = request.rules.checked_task()
        low, start = lowest(task), gentlest(task)
        order = self._order(request, task)
        gains = task.table.overall_row.coefficients
        gaining = [row for row in order if gains[row, low[row]] > gains[row, start[row]]]
        steps = [(row, int(low[row])) for row in gaining]
        columns = within_changes(task, start, fill(task, start, steps), order)
        return Decision(columns, "feasible", lower_bound(task), task)


def random_order(request: Request, task: Task) -> list[int]:
    """Shuffle; the same seed and step give the same order."""
    generator = np.random.default_rng([request.settings.seed, request.step])
    return [int(row) for row in generator.permutation(len(task.table.options))]


def error_order(policy: str, metric: str) -> Order:
    """Return the order by a local quantization error of the lowest option, the smallest first."""

    def order(request: Request, task: Task) -> list[int]:
        low, gentle = lowest(task), gentlest(task)
        rows = np.flatnonzero(low != gentle).tolist()  # pinned linears need no score
        scores = {row: metric_of(request, policy, metric, row, int(low[row])) for row in rows}
        return sorted(rows, key=lambda row: (scores[row], row))

    return order


def layer_type_order(request: Request, task: Task) -> list[int]:
    """Order by kind of linear (`KIND_ORDER`), then as the model runs them."""
    names = task.table.names
    keys = [(_kind_rank(name), natural_key(name)) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def layer_id_order(request: Request, task: Task) -> list[int]:
    """Order from the middle layer outwards, so that the first and last layers are protected."""
    depth = _relative_depths(task.table)
    names = task.table.names
    keys = [(abs(depth[row] - 0.5), natural_key(name)) for row, name in enumerate(names)]
    return sorted(range(len(names)), key=keys.__getitem__)


def _kind_rank(name: str) -> int:
    kind = name.rsplit(".", 1)[-1]
    return KIND_ORDER.index(kind) + 1 if kind in KIND_ORDER else 0


def _relative_depths(table: Table) -> list[float]:
    """Return layer / last layer of each linear; the place in the file where a name has none."""
    layers = []
    for row, name in enumerate(table.names):
        try:
            layers.append(split_linear_name(name)[1])
        except ValueError:
            layers.append(row)
    last = max(layers)
    return [layer / last if last else 0.5 for layer in layers]
