"""Pictures of a comparison's table: gaps, curves, and quality beside speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatron_snip.comparison.contender import BASELINE
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.run import Entry
from megatron_snip.comparison.table import Row, Table
from megatron_snip.reporting.figures.canvas import WIDE, Canvas, png, step_ticks
from megatron_snip.reporting.labels import label_of

Floats = NDArray[np.float64]

_DASHES = ("solid", "dashed", "dotted", "dashdot")
_LEGEND_COLUMNS = 3


def drawn_rows(table: Table) -> tuple[Row, ...]:
    """Return the rows that have a gap to show: of all but BF16, with a seed that BF16 has too."""
    return tuple(r for r in table.rows if r.contender != BASELINE and r.gap.count)


def finished_of(
    table: Table, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]
) -> list[Entry]:
    """Return the entries of a table whose runs have finished."""
    place = (table.mode, table.lowest, table.target)
    return [e for e in entries if (e.mode, e.lowest, e.target) == place and e.run.key in outcomes]


def draw_table(
    table: Table, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]
) -> bytes | None:
    """Return a PNG: gaps on the left, curves on the right; None while BF16 alone has finished.

    Args:
        table: what to draw.
        entries: of the comparison; those of the table are taken.
        outcomes: of finished runs, by key.
    """
    if not drawn_rows(table):
        return None
    with WIDE.style():
        figure = WIDE.figure(4.2)
        left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.5])
        _draw_gaps(left, WIDE, table)
        _draw_curves(right, WIDE, table, entries, outcomes)
        right.legend(ncols=2)
        figure.suptitle(table.title)
        return png(figure, WIDE)


def gap_bars(canvas: Canvas, table: Table) -> Figure:
    """Draw each contender's gap to BF16 with its spread over seeds."""
    figure = canvas.figure(0.8 + 0.26 * len(drawn_rows(table)))
    _draw_gaps(figure.subplots(), canvas, table)
    return figure


def gap_curves(
    canvas: Canvas, table: Table, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]
) -> Figure:
    """Draw how each contender's training loss departs from BF16's."""
    figure = canvas.figure(3.4 + _legend_height(canvas, table))
    _draw_curves(figure.subplots(), canvas, table, entries, outcomes)
    figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS)
    return figure


def gap_against_time(canvas: Canvas, table: Table, device: str) -> Figure:
    """Draw each contender's gap against its predicted step time on a device.

    Args:
        canvas: what to draw on.
        table: what to draw.
        device: one of its rows' `step_time`.
    """
    figure = canvas.figure(3.0 + _legend_height(canvas, table))
    axes, colors = figure.subplots(), _colors(canvas, table)
    axes.plot([1.0], [0.0], marker="*", color=canvas.theme.text, linestyle="none", label=BASELINE)
    for k, row in enumerate(drawn_rows(table)):
        axes.errorbar(
            [row.step_time[device]],
            [1e3 * row.gap.mean],
            yerr=[1e3 * np.nan_to_num(row.gap.deviation)],
            color=colors[row.contender],
            marker="os^Dv"[k // len(canvas.theme.lines) % 5],
            linestyle="none",
            label=label_of(row.contender),
        )
    axes.set_xlabel(f"predicted step time on {label_of(device)} over BF16's")
    axes.set_ylabel("held-out loss minus BF16's, 1e-3")
    axes.grid()
    figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS)
    return figure


def departure(
    runs: Sequence[tuple[Outcome, int]], baselines: Mapping[int, Outcome]
) -> tuple[NDArray[np.int64], Floats] | None:
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


def _draw_gaps(axes: Any, canvas: Canvas, table: Table) -> None:
    rows, colors = drawn_rows(table), _colors(canvas, table)
    places = range(len(rows))
    axes.barh(
        places,
        [1e3 * row.gap.mean for row in rows],
        xerr=[1e3 * np.nan_to_num(row.gap.deviation) for row in rows],
        color=[colors[row.contender] for row in rows],
        ecolor=canvas.theme.text,
    )
    for place, row in zip(places, rows, strict=True):
        if math.isnan(row.gap.mean):
            axes.text(0.0, place, " not finite", va="center", color=canvas.theme.warning)
    axes.set_yticks(places, [label_of(row.contender) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("held-out loss minus BF16's, 1e-3")


def _draw_curves(
    axes: Any,
    canvas: Canvas,
    table: Table,
    entries: Sequence[Entry],
    outcomes: Mapping[str, Outcome],
) -> None:
    here = finished_of(table, entries, outcomes)
    for k, (name, color) in enumerate(_colors(canvas, table).items()):
        curve = departure(
            [(outcomes[e.run.key], e.seed) for e in here if e.contender == name],
            {e.seed: outcomes[e.run.key] for e in here if e.contender == BASELINE},
        )
        if curve is None:
            continue
        dash = _DASHES[k // len(canvas.theme.lines) % len(_DASHES)]
        label = label_of(name)
        axes.plot(curve[0], 1e3 * curve[1], color=color, linestyle=dash, label=label)
    axes.axhline(0.0, color=canvas.theme.muted, linewidth=0.8)
    axes.set_xlabel("training step")
    axes.set_ylabel("training loss minus BF16's\n(mean so far), 1e-3")
    axes.xaxis.set_major_locator(step_ticks(8))


def _legend_height(canvas: Canvas, table: Table) -> float:
    """Return the inches that a legend of all contenders takes."""
    return 0.2 * math.ceil((len(drawn_rows(table)) + 1) / _LEGEND_COLUMNS)


def _colors(canvas: Canvas, table: Table) -> dict[str, str]:
    lines = canvas.theme.lines
    return {row.contender: lines[k % len(lines)] for k, row in enumerate(drawn_rows(table))}
