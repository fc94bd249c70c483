"""Picture of time: what a run's seconds went to, in all and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_snip.reporting.figures.canvas import Canvas, step_ticks
from megatron_snip.reporting.figures.training import run_line
from megatron_snip.reporting.labels import label_of
from megatron_snip.reporting.phases import Phases
from megatron_snip.reporting.run_record import RunRecord


def time_bars(canvas: Canvas, names: Sequence[str], phases: Sequence[Phases]) -> Figure:
    """Draw one bar a run: step, refresh and wait end to end, and the solver's time below it.

    Args:
        canvas: what to draw on.
        names: of the runs.
        phases: of the runs; at least one.
    """
    theme = canvas.theme
    figure = canvas.figure(1.3 + 0.75 * len(phases))
    axes = figure.subplots()
    colors = {"step": theme.lines[2], "refresh": theme.lines[4], "wait": theme.warning}
    for k, parts in enumerate(phases):
        left = 0.0
        for part, color in colors.items():
            seconds = getattr(parts, part)
            label = part if k == 0 else None
            axes.barh(k, seconds, 0.42, left, color=color, label=label, zorder=2)
            left += seconds
        solver: dict[str, Any] = {"facecolor": "none", "edgecolor": theme.muted, "hatch": "////"}
        label = "solver, beside training" if k == 0 else None
        axes.barh(k + 0.34, parts.solve, 0.18, label=label, linewidth=0.7, zorder=2, **solver)
    axes.set_ylim(len(phases) - 0.3, -0.4)
    axes.set_yticks(range(len(phases)), list(map(label_of, names)) if len(phases) > 1 else [""])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5 if canvas.narrow else 8))
    axes.set_xlabel("seconds")
    axes.grid(axis="x")
    figure.legend(loc="outside upper left", ncols=2 if canvas.narrow else 4)
    return figure


def step_seconds(canvas: Canvas, runs: Sequence[RunRecord]) -> Figure:
    """Draw the wall time of every step; refreshes are marked.

    Args:
        canvas: what to draw on.
        runs: at least one.
    """
    figure = canvas.figure(2.6)
    axes = figure.subplots()
    for k, run in enumerate(runs):
        line = run_line(k, canvas.theme)
        if len(runs) == 1:
            line["color"] = canvas.theme.lines[2]
        steps, seconds = run.metrics.column("wall_s")
        label = "wall time" if len(runs) == 1 else label_of(run.name)
        axes.plot(steps, seconds, **line, linewidth=1.2, label=label)
        at, _ = run.metrics.column("refresh_s")
        marked = np.isin(steps, at)
        if marked.any():
            accent = canvas.theme.lines[4] if len(runs) == 1 else line["color"]
            axes.plot(
                steps[marked],
                seconds[marked],
                linestyle="none",
                marker="o",
                markersize=4.5,
                color=accent,
                label="with a refresh" if len(runs) == 1 else None,
            )
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(step_ticks(8))
    axes.set_xlabel("training step")
    axes.set_ylabel("seconds a step")
    axes.grid(axis="y")
    axes.legend(loc="best")
    return figure
