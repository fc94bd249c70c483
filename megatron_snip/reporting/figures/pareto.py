"""Picture of the frontier: the least quality loss at every efficiency, and where the plan lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megatron_snip.planning.pareto import ParetoPoint
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.figures.canvas import Canvas
from megatron_snip.reporting.figures.training import run_color, run_line
from megatron_snip.reporting.labels import label_of


@dataclass(frozen=True)
class Frontier:
    """A run's frontier at its last refresh.

    Attributes:
        name: of the run.
        step: that was measured.
        points: in ascending order of targets.
        plan: made from that refresh or, if that one has not been applied, the one in force.
        plan_loss: quality loss of `plan` at that refresh; None where it cannot be told.
    """

    name: str
    step: int
    points: tuple[ParetoPoint, ...]
    plan: PrecisionPlan | None
    plan_loss: float | None


def pareto_curves(canvas: Canvas, frontiers: Sequence[Frontier]) -> Figure:
    """Draw the frontiers, and each plan as a star.

    Args:
        canvas: what to draw on.
        frontiers: at least one, each with a point that can be reached.
    """
    theme = canvas.theme
    figure = canvas.figure(2.8)
    axes = figure.subplots()
    for k, frontier in enumerate(frontiers):
        color = run_color(k, theme)
        reached = [
            (p.efficiency, p.objective)
            for p in frontier.points
            if p.efficiency is not None and p.objective is not None
        ]
        label = "best plan at each target" if len(frontiers) == 1 else label_of(frontier.name)
        axes.plot(
            [efficiency for efficiency, _ in reached],
            [objective for _, objective in reached],
            **run_line(k, theme),
            marker="o",
            markersize=3.5,
            linewidth=1.4,
            label=label,
        )
        if frontier.plan is not None and frontier.plan_loss is not None:
            axes.plot(
                [frontier.plan.efficiency],
                [frontier.plan_loss],
                linestyle="none",
                marker="*",
                markersize=14,
                color=theme.lines[3] if len(frontiers) == 1 else color,
                markeredgecolor=theme.surface,
                label="plan in force" if len(frontiers) == 1 else None,
                zorder=4,
            )
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("efficiency: share of linear FLOPs in the lowest precision")
    if canvas.narrow:
        axes.set_xlabel("efficiency")
    axes.set_ylabel("quality loss")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid()
    axes.legend(loc="upper left")
    return figure
