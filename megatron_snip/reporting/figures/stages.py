"""Picture of pipeline stages: the efficiency that each reaches. The lowest one sets the pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megatron_snip.reporting.figures.canvas import Canvas
from megatron_snip.reporting.figures.palette import format_color
from megatron_snip.reporting.run_record import PlanSpan


def stage_bars(
    canvas: Canvas, spans: Sequence[PlanSpan], target: float | None, lowest: str = "fp4"
) -> Figure:
    """Draw the stages under the last plan as bars, under earlier plans as dots.

    Args:
        canvas: what to draw on.
        spans: of plans; at least one.
        target: drawn as a line, where there is one.
        lowest: the format that efficiency counts, for its color.
    """
    theme = canvas.theme
    plans = [span.plan for span in spans if span.plan is not None]
    stages = plans[-1].stages
    figure = canvas.figure(2.8)
    axes = figure.subplots()
    places = list(range(len(stages)))
    color = format_color(lowest, theme)
    axes.bar(places, stages, width=0.6, color=color, label="plan in force", zorder=2)
    before = [plan for plan in plans[:-1] if len(plan.stages) == len(stages)]
    for k, plan in enumerate(before):
        axes.plot(
            places,
            plan.stages,
            linestyle="none",
            marker="o",
            markersize=4,
            color=theme.text,
            markeredgecolor=theme.surface,
            alpha=0.35 + 0.5 * (k + 1) / len(before),
            label="earlier plans" if k == 0 else None,
            zorder=3,
        )
    if target is not None:
        style: dict[str, Any] = {"color": theme.text, "linewidth": 1.0, "linestyle": (0, (4, 3))}
        axes.axhline(target, label="target", zorder=4, **style)
    if len(stages) <= 8:
        for place, value in zip(places, stages, strict=True):
            axes.text(place, 0.03, f"{value:.0%}", ha="center", color="#1f2733", zorder=5)
    axes.set_xlim(-0.8, len(stages) - 0.2)
    axes.set_ylim(0.0, 1.12)
    axes.set_yticks(np.linspace(0.0, 1.0, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    shown = places[:: max(1, len(stages) // 16)]
    axes.set_xticks(shown, [str(stage) for stage in shown])
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("efficiency")
    axes.grid(axis="y")
    figure.legend(loc="outside upper right", ncols=3)
    return figure
