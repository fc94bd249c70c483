"""greedy: the cheapest efficiency first, by ratio.

From every linear's option of least quality loss, repeatedly take the step that pays the least
quality loss per gain, along each linear's lower convex hull, until the target is reached. This is
the linear relaxation rounded up, and what `snip` must beat.
"""

from __future__ import annotations

import numpy as np

from megatron_snip.planning.policies.fill import fill, within_changes
from megatron_snip.planning.policies.policy import Decision, Request
from megatron_snip.planning.solve import lower_bound
from megatron_snip.planning.table import Ints
from megatron_snip.planning.task import Task


class GreedyPolicy:
    """Takes hull steps in order of loss per gain."""

    name = "greedy"
    wants_bf16 = False
    minimizes_loss = False
    heeds_target = True

    def decide(self, request: Request) -> Decision:
        """Take the cheapest steps until the rules are met; see `Policy`."""
        task = request.rules.checked_task()
        loss = np.where(task.allowed, task.table.quality, np.inf)
        gains = np.where(task.allowed, task.table.overall_row.coefficients, -1)
        start: Ints = np.lexsort((-gains, loss), axis=1)[:, 0]
        steps = hull_steps(task, start)
        filled = fill(task, start, [(row, column) for _, row, column in steps])
        order = list(dict.fromkeys([*(row for _, row, _ in steps), *range(len(start))]))
        columns = within_changes(task, start, filled, order)
        return Decision(columns, "feasible", lower_bound(task), task)


def hull_steps(task: Task, start: Ints) -> list[tuple[float, int, int]]:
    """Return all steps along the linears' lower convex hulls, the cheapest per gain first.

    Args:
        task: allowed options, quality losses and gains.
        start: [n], column of least loss of each linear.

    Returns:
        (loss per gain, row, column after the step); a linear's steps come in order of gain.
    """
    steps = []
    gains, loss = task.table.overall_row.coefficients, task.table.quality
    for row, first in enumerate(start.tolist()):
        columns = np.flatnonzero(task.allowed[row])
        points = {int(c): (int(gains[row, c]), float(loss[row, c])) for c in columns}
        at = first
        while True:
            slopes = [
                ((points[c][1] - points[at][1]) / (points[c][0] - points[at][0]), -points[c][0], c)
                for c in points
                if points[c][0] > points[at][0]
            ]
            if not slopes:
                break
            slope, _, at = min(slopes)
            steps.append((slope, row, at))
    # Slopes grow along a hull, so that the stable order by slope keeps each linear's steps in line.
    return sorted(steps, key=lambda step: step[0])
