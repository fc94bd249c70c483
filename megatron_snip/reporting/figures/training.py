"""Pictures of training: the loss with plan changes marked, and how much runs in low precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from megatron_snip.reporting.figures.canvas import Canvas, Theme, step_ticks
from megatron_snip.reporting.figures.palette import format_color
from megatron_snip.reporting.labels import label_of
from megatron_snip.reporting.run_record import RunRecord

_MARKED = 60
"""Plan changes of one run that are drawn as lines; more would hide the curve."""

Floats = NDArray[np.float64]


def run_color(index: int, theme: Theme) -> str:
    """Return the color of the run that was named `index`-th."""
    return theme.lines[index % len(theme.lines)]


def run_line(index: int, theme: Theme) -> dict[str, Any]:
    """Return how a run's curve is drawn; where colors are used again, its line is another."""
    styles = ("-", "-.", ":")
    turn = index // len(theme.lines) % len(styles)
    return {"color": run_color(index, theme), "linestyle": styles[turn]}


def loss_curves(canvas: Canvas, runs: Sequence[RunRecord]) -> Figure:
    """Draw training and validation losses of all runs, and differences to the first where several.

    Args:
        canvas: what to draw on.
        runs: at least one.
    """
    differences = _differences(runs)
    tall = 3.0 if canvas.narrow else 3.6
    figure = canvas.figure(tall + (1.5 if differences else 0.0))
    if differences:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[tall, 1.4])
        _draw_differences(canvas, below, runs, differences)
    else:
        axes = below = figure.subplots()
    for k, run in enumerate(runs):
        _draw_run(canvas, axes, run, k, len(runs) == 1)
    _finish(axes, "loss")
    below.set_xlabel("training step")
    axes.legend(loc="upper right")
    return figure


def precision_share(canvas: Canvas, runs: Sequence[RunRecord]) -> Figure:
    """Draw the share of linear FLOPs in the lowest precision over the steps, with the targets.

    Args:
        canvas: what to draw on.
        runs: at least one.
    """
    figure = canvas.figure(2.6)
    axes = figure.subplots()
    for k, run in enumerate(runs):
        line = run_line(k, canvas.theme)
        if len(runs) == 1 and run.snip is not None:
            line["color"] = format_color(run.snip.lowest_format, canvas.theme)
        steps, shares = run.metrics.column("lowest_precision_fraction")
        name = (
            run.lowest_formats if len(runs) == 1 else f"{label_of(run.name)} ({run.lowest_formats})"
        )
        axes.plot(*_staircase(steps, shares), **line, linewidth=1.8, label=name)
    targets = {run.target: k for k, run in reversed(list(enumerate(runs))) if run.target}
    for target, k in targets.items():
        color = canvas.theme.muted if len(runs) == 1 else run_color(k, canvas.theme)
        label = "target" if len(targets) == 1 else None
        axes.axhline(target, color=color, linewidth=1.0, linestyle=(0, (4, 3)), label=label)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(axes, "share of linear FLOPs")
    axes.set_xlabel("training step")
    axes.legend(loc="best")
    return figure


def _draw_run(canvas: Canvas, axes: Any, run: RunRecord, index: int, alone: bool) -> None:
    theme, color = canvas.theme, run_color(index, canvas.theme)
    changes = [span.start for span in run.plans if span.changed > 0]
    if alone:
        _mark_changes(canvas, axes, run, changes)
    steps, losses = run.metrics.column("loss")
    label = "training" if alone else label_of(run.name)
    axes.plot(steps, losses, **run_line(index, theme), linewidth=1.4, label=label, zorder=3)
    steps, losses = run.metrics.column("validation_loss")
    seen = np.isfinite(losses)
    if seen.any():
        accent = theme.lines[3] if alone else color
        axes.plot(
            steps[seen],
            losses[seen],
            linestyle="none",
            marker="o",
            markersize=5,
            markerfacecolor=accent if alone else "none",
            markeredgecolor=accent,
            label="validation" if alone else None,
            zorder=4,
        )
    if not alone:
        axes.plot(
            changes,
            [0.015 + 0.035 * index] * len(changes),
            linestyle="none",
            marker="|",
            markersize=7,
            color=color,
            transform=axes.get_xaxis_transform(),
        )


def _mark_changes(canvas: Canvas, axes: Any, run: RunRecord, changes: list[int]) -> None:
    """Draw plan changes as lines (ticks at the bottom where there are many), and events."""
    theme = canvas.theme
    style: dict[str, Any] = {"color": theme.muted, "linewidth": 1.0, "zorder": 1}
    height = 1.0 if len(changes) <= _MARKED else 0.04
    for k, step in enumerate(changes):
        label = "plan changed" if k == 0 else None
        axes.axvline(step, 0.0, height, linestyle=(0, (2, 2)), label=label, **style)
    for k, step in enumerate(sorted({event.step for event in run.metrics.events})):
        label = "event" if k == 0 else None
        axes.axvline(step, color=theme.warning, linewidth=1.4, label=label, zorder=2)


def _differences(runs: Sequence[RunRecord]) -> list[tuple[int, NDArray[np.int64], Floats]]:
    """Return (run, steps, loss minus the first run's), smoothed, for runs with common steps."""
    if len(runs) < 2:
        return []
    base_steps, base = runs[0].metrics.column("loss")
    found = []
    for k, run in enumerate(runs[1:], start=1):
        steps, losses = run.metrics.column("loss")
        common, first, second = np.intersect1d(base_steps, steps, return_indices=True)
        difference = losses[second] - base[first]
        finite = np.isfinite(difference)
        if finite.any():
            found.append((k, common[finite], _smooth(difference[finite])))
    return found


def _draw_differences(
    canvas: Canvas,
    axes: Any,
    runs: Sequence[RunRecord],
    differences: list[tuple[int, NDArray[np.int64], Floats]],
) -> None:
    axes.axhline(0.0, color=run_color(0, canvas.theme), linewidth=1.2)
    for k, steps, values in differences:
        axes.plot(steps, values, **run_line(k, canvas.theme), linewidth=1.4)
    _finish(axes, f"minus {runs[0].name}" if len(runs[0].name) < 14 else "minus first run")


def _smooth(values: Floats) -> Floats:
    """Mean over a hundredth of the run around each step."""
    width = max(1, len(values) // 100)
    if width == 1:
        return values
    kernel = np.ones(width)
    weights = np.convolve(np.ones_like(values), kernel, "same")
    return np.convolve(values, kernel, "same") / weights


def _staircase(steps: NDArray[np.int64], values: Floats) -> tuple[Floats, Floats]:
    """Return the corners of a line that keeps each value until the next step."""
    edges = np.append(steps, steps[-1] + 1).astype(np.float64) if steps.size else np.zeros(0)
    return np.repeat(edges, 2)[1:-1], np.repeat(values, 2)


def _finish(axes: Any, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(step_ticks(8))
