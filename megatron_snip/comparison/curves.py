"""Pictures of a table: gaps by contender, and how the training loss departs from BF16's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip.comparison.contender import BASELINE
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.run import Entry
from megatron_snip.comparison.table import Table
from megatron_snip.reporting.figures.canvas import WIDE, png, step_ticks

_DASHES = ("solid", "dashed", "dotted")


def draw_table(
    table: Table, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]
) -> bytes | None:
    """Return a PNG: gaps on the left, curves on the right; None while BF16 alone has finished.

    Args:
        table: what to draw.
        entries: of the comparison; those of the table are taken.
        outcomes: of finished runs, by key.
    """
    rows = [row for row in table.rows if row.contender != BASELINE and row.gap.count]
    if not rows:
        return None
    canvas = WIDE
    with canvas.style():
        figure = canvas.figure(4.2)
        left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.5])
        colors = {
            row.contender: canvas.theme.lines[k % len(canvas.theme.lines)]
            for k, row in enumerate(rows)
        }
        places = range(len(rows))
        left.barh(
            places,
            [1e3 * row.gap.mean for row in rows],
            xerr=[1e3 * np.nan_to_num(row.gap.deviation) for row in rows],
            color=[colors[row.contender] for row in rows],
        )
        left.set_yticks(places, [row.contender for row in rows])
        left.invert_yaxis()
        left.set_xlabel("held-out loss minus BF16's, 1e-3")
        _draw_curves(right, table, entries, outcomes, colors)
        figure.suptitle(table.title)
        return png(figure, canvas)


def _draw_curves(
    axes: Any,
    table: Table,
    entries: Sequence[Entry],
    outcomes: Mapping[str, Outcome],
    colors: Mapping[str, str],
) -> None:
    place = (table.mode, table.lowest, table.target)
    here = [e for e in entries if (e.mode, e.lowest, e.target) == place and e.run.key in outcomes]
    for k, name in enumerate(colors):
        curve = departure(
            [(outcomes[e.run.key], e.seed) for e in here if e.contender == name],
            {e.seed: outcomes[e.run.key] for e in here if e.contender == BASELINE},
        )
        if curve is None:
            continue
        dash = _DASHES[k // len(WIDE.theme.lines) % len(_DASHES)]
        axes.plot(curve[0], 1e3 * curve[1], color=colors[name], linestyle=dash, label=name)
    axes.axhline(0.0, color=WIDE.theme.muted, linewidth=0.8)
    axes.set_xlabel("training step")
    axes.set_ylabel("training loss minus BF16's\n(mean so far), 1e-3")
    axes.xaxis.set_major_locator(step_ticks(8))
    axes.legend(ncols=2)


def departure(
    runs: Sequence[tuple[Outcome, int]], baselines: Mapping[int, Outcome]
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Return (steps, mean over seeds of the running mean of loss minus BF16's), or None.

    A running mean, since the difference of a single step is mostly its noise.

    Args:
        runs: (outcome, seed) of one contender.
        baselines: BF16's outcomes by seed.
    """
    curves = []
    steps: NDArray[np.int64] | None = None
    for outcome, seed in runs:
        base = baselines.get(seed)
        if base is None or base.steps != outcome.steps:
            continue
        difference = np.array(outcome.losses) - np.array(base.losses)
        curves.append(np.cumsum(difference) / np.arange(1, len(difference) + 1))
        steps = np.array(outcome.steps, np.int64)
    if steps is None:
        return None
    return steps, np.mean(curves, axis=0)
