"""Figures of runs, drawn with matplotlib in one style and one width.

Each function returns one figure; `svg` makes a file of it. Text is drawn as shapes, so a figure
looks the same with any fonts. `$` in a name starts no formula.
"""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_snip.alert_thresholds import HealthMeasure
from megatron_snip.formats import FORMATS
from megatron_snip.options import Option
from megatron_snip.reporting.linear_grid import Floats, LinearGrid
from megatron_snip.reporting.metrics_file import MetricRows
from megatron_snip.reporting.run_record import Divergences, PlanSpan, RunRecord
from megatron_snip.reporting.style import LINE, MUTED, STYLE, SURFACE, WARNING, format_colors
from megatron_snip.reporting.text import label
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.types import Gemm, Operand

Points = Sequence[tuple[float, float]]


@matplotlib.rc_context(STYLE)
def svg(figure: Figure) -> bytes:
    """Return a figure as SVG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _new_figure(height_in: float) -> Figure:
    return Figure(figsize=(10.0, height_in), layout="constrained")


@matplotlib.rc_context(STYLE)
def plan_map(linears: Mapping[str, Option]) -> Figure:
    """Draw a plan: a cell per linear, or three (fprop, dgrad, wgrad) where options are mixed."""
    grid = LinearGrid(linears)
    gemms = _gemms(linears.values())
    tables = [_format_table(grid, linears, gemm) for gemm in gemms]
    cells = np.stack(tables, axis=2).reshape(len(grid.rows), -1)
    figure = _new_figure(grid.height_in + 0.8)
    axes = figure.subplots()
    grid.draw(axes, np.arange(cells.shape[1] + 1) / len(gemms), cells, **_format_scale())
    axes.set_ylabel("layer")
    axes.set_xticks(np.arange(len(grid.columns)) + 0.5, grid.columns)
    note = None
    if len(gemms) > 1:
        note = "each linear: fprop, dgrad, wgrad"
        for column in range(1, len(grid.columns)):
            axes.axvline(column, color=SURFACE, linewidth=5)
    _format_legend(figure, linears.values(), note)
    return figure


@matplotlib.rc_context(STYLE)
def plan_history(spans: Sequence[PlanSpan]) -> Figure:
    """Draw the plans over the iterations: a panel per kind of linear and GEMM."""
    names: dict[str, None] = {}
    options: set[Option] = set()
    for span in spans:
        names |= dict.fromkeys(span.plan.linears)
        options |= set(span.plan.linears.values())
    grid = LinearGrid(names)
    gemms = _gemms(options)
    panels = list(itertools.product(gemms, range(len(grid.columns))))
    across = min(len(grid.columns), 4)
    down = math.ceil(len(panels) / across)
    figure = _new_figure(down * (grid.height_in + 0.45) + 0.5)
    axes_of = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
    edges = np.array([span.start for span in spans] + [spans[-1].end], np.float64)
    for axes, (gemm, column) in zip(axes_of, panels, strict=False):
        tables = [_format_table(grid, span.plan.linears, gemm) for span in spans]
        cells = np.stack([table[:, column] for table in tables], axis=1)
        grid.draw(axes, edges, cells, **_format_scale())
        name = grid.columns[column]
        axes.set_title(name if len(gemms) == 1 else f"{name}, {gemm}")
        axes.xaxis.set_major_locator(_iteration_ticks(5))
        axes.label_outer()
    for axes in list(axes_of)[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("iteration", fontsize="medium")
    figure.supylabel("layer", fontsize="medium")
    _format_legend(figure, options)
    return figure


@matplotlib.rc_context(STYLE)
def divergence_maps(record: Divergences) -> Figure:
    """Draw both divergences of the quantized uniform options, each on one logarithmic scale.

    Args:
        record: Divergences of at least one quantized uniform option.
    """
    options = record.uniform_quantized_options
    grid = LinearGrid(linear.name for linear in record.linears)
    figure = _new_figure(2 * (grid.height_in + 0.6))
    panels = figure.subplots(2, len(options), sharex=True, sharey=True, squeeze=False)
    for line, measure in zip(panels, ("loss_divergence", "weight_divergence"), strict=True):
        text = measure.replace("_", " ")
        tables = {f"{text}, {o}": grid.table(record.values(o, measure)) for o in options}
        # Near the smallest doubles LogNorm fails.
        values = np.concatenate([table[table > 1e-200] for table in tables.values()])
        low, high = (values.min(), values.max()) if values.size else (0.1, 1.0)
        high = high if high > low else low * 10
        # Three ticks of our own: matplotlib's are formulas, which `parse_math` leaves as TeX.
        ticks = {"ticks": np.geomspace(low, high, 3), "format": "%.0e"}
        # LogNorm leaves out what is not positive.
        _draw_line(line, grid, tables, "viridis", LogNorm(low, high), **ticks)
    return figure


@matplotlib.rc_context(STYLE)
def health_maps(tables: Sequence[HealthTable]) -> Figure:
    """Draw SQNR and underflow of each operand in the lowest precision, two rows for each table.

    Args:
        tables: Tables with at least one linear each; panels of a measure share one scale.
    """
    grid = LinearGrid(linear.name for linear in tables[-1].linears)
    measures: dict[HealthMeasure, str] = {"sqnr_db": "SQNR in dB", "underflow": "underflow"}
    lines = list(itertools.product(measures, tables))
    figure = _new_figure(len(lines) * (grid.height_in + 0.6))
    panels = figure.subplots(len(lines), len(Operand), sharex=True, sharey=True, squeeze=False)
    for line, (measure, table) in zip(panels, lines, strict=True):
        values = [0.0]
        every = [other.findings(measure, other.lowest) for other in tables]
        if any(every):
            values = [each.value for each in itertools.chain.from_iterable(every)]
        findings = table.findings(measure, table.lowest)
        cells = {}
        for operand in Operand:
            found = {each.linear: each.value for each in findings if each.tensor == operand}
            title = f"{measures[measure]}, {operand}, iteration {table.iteration}"
            cells[title] = grid.table(found)
        colors = "viridis" if measure == "underflow" else "viridis_r"
        _draw_line(line, grid, cells, colors, Normalize(min(values), max(values)))
    return figure


def _draw_line(
    line: Any, grid: LinearGrid, tables: dict[str, Floats], colors: str, scale: Any, **ticks: Any
) -> None:
    """Draw maps side by side, by title, on one scale."""
    edges = np.arange(len(grid.columns) + 1.0)
    for axes, (title, table) in zip(line, tables.items(), strict=True):
        mesh = grid.draw(axes, edges, table, cmap=colors, norm=scale)
        axes.set_title(title)
        axes.set_xticks(edges[:-1] + 0.5, grid.columns)
    line[0].set_ylabel("layer")
    bar = line[0].figure.colorbar(mesh, ax=list(line), pad=0.02, aspect=14, **ticks)
    bar.outline.set_visible(False)
    bar.minorticks_off()


@matplotlib.rc_context(STYLE)
def health_histograms(tables: Sequence[HealthTable]) -> Figure:
    """Draw how magnitudes are distributed in the three linears with the lowest SQNR.

    Args:
        tables: At most two tables; the linears are those of the last one.
    """
    findings = tables[-1].findings("sqnr_db", tables[-1].lowest)
    # The worst come first; a table without findings shows its first linear.
    ordered = [*(finding.linear for finding in findings), tables[-1].linears[0].name]
    names = list(dict.fromkeys(ordered))[:3]
    figure = _new_figure(1.5 * len(names) + 0.6)
    panels = figure.subplots(len(names), len(Operand), sharex="col", sharey=True, squeeze=False)
    for line, name in zip(panels, names, strict=True):
        for axes, operand in zip(line, Operand, strict=True):
            for table in tables:
                color = LINE if table is tables[-1] else MUTED
                linear = next((x for x in table.linears if x.name == name), None)
                if linear is not None and operand in linear.histograms:
                    first, shares = linear.histograms[operand]
                    edges = first + np.arange(len(shares) + 1)
                    axes.stairs(shares, edges, color=color, label=f"iteration {table.iteration}")
            title = f"{name}\n{operand}" if operand is Operand.INPUT else str(operand)
            for finding in findings:
                if finding.linear == name and finding.tensor == operand:
                    title += f", {finding.value:.3g} dB"
            axes.set_title(title)  # a name may be as wide as three panels
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.xaxis.set_major_locator(_iteration_ticks(6))
    handles = panels[0][0].get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    figure.supxlabel("log2 of the magnitude", fontsize="medium")
    return figure


def _gemms(options: Iterable[Option]) -> tuple[Gemm, ...]:
    """Return the GEMMs to draw: one stands for all three where every option is uniform."""
    is_mixed = any(len(set(option.formats)) > 1 for option in options)
    return tuple(Gemm) if is_mixed else (Gemm.FPROP,)


def _format_table(grid: LinearGrid, linears: Mapping[str, Option], gemm: Gemm) -> Floats:
    index = {name: float(k) for k, name in enumerate(FORMATS)}  # the numbers of `_format_scale`
    return grid.table({name: index[option[gemm]] for name, option in linears.items()})


def _format_scale() -> dict[str, Any]:
    colors = list(format_colors().values())
    return {"cmap": ListedColormap(colors), "vmin": -0.5, "vmax": len(colors) - 0.5}


def _format_legend(figure: Figure, options: Iterable[Option], title: str | None = None) -> None:
    names = set(itertools.chain.from_iterable(option.formats for option in options))
    ordered = sorted(names, key=lambda name: -FORMATS[name].bits)
    colors = format_colors()
    entries = [Patch(color=colors[name], label=name) for name in ordered]
    figure.legend(handles=entries, loc="outside upper right", ncols=len(entries), title=title)


def _iteration_ticks(most: int) -> MaxNLocator:
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])


@matplotlib.rc_context(STYLE)
def loss_curves(run: RunRecord, reference: tuple[str, MetricRows] | None = None) -> Figure:
    """Draw training and validation losses, and the gap to a reference below.

    Args:
        run: The run.
        reference: Name and metrics of the run that the gap is taken to.
    """
    panels = 1 if reference is None else 2
    figure = _new_figure(2.3 + 1.5 * panels)
    ratios = (3.2, 1.5)[:panels]
    all_axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    axes = all_axes[0]
    lower = all_axes[-1]
    if reference is not None:
        name, metrics = reference
        iterations, losses = metrics.column("loss")
        axes.plot(iterations, losses, color=MUTED, linewidth=1.2, label=label(name))
        lower.axhline(0.0, color=MUTED, linewidth=1.2)
        lower.set_ylabel("gap")
        lower.grid(axis="y")
        common, gap = run.metrics.gap_to(metrics)
        lower.plot(common, gap, color=LINE, linewidth=1.4)
    changes = [span.start for span in run.plans if span.num_changed]
    failures = sorted({at for at, kind, _ in run.metrics.notices if kind != "health"})
    for text, marked, style in (
        ("plan changed", changes, {"color": MUTED, "linewidth": 1.0, "linestyle": ":"}),
        ("failure", failures, {"color": WARNING, "linewidth": 1.2}),
    ):
        for k, at in enumerate(marked):
            axes.axvline(at, **style, label=text if k == 0 else None)
    iterations, losses = run.metrics.column("loss")
    axes.plot(iterations, losses, color=LINE, linewidth=1.4, label="training", zorder=3)
    evaluated, losses = run.metrics.column("validation_loss")
    is_known = np.isfinite(losses)
    if is_known.any():
        style = {"color": LINE, "markersize": 5, "markeredgecolor": SURFACE}
        axes.plot(evaluated[is_known], losses[is_known], "o", **style, label="validation", zorder=4)
    _finish(figure, axes, "loss")
    lower.set_xlabel("iteration")
    lower.xaxis.set_major_locator(_iteration_ticks(8))
    return figure


def _finish(figure: Figure, axes: Any, ylabel: str) -> None:
    axes.set_ylabel(ylabel)
    axes.grid(axis="y")
    count = len(axes.get_legend_handles_labels()[0])
    figure.legend(loc="outside upper right", ncols=min(count, 5))


@matplotlib.rc_context(STYLE)
def frontier_curve(points: Points, plan: tuple[float, float] | None, lowest: str) -> Figure:
    """Draw the least quality loss at each efficiency; a star marks the current plan.

    Args:
        points: (efficiency, quality loss) in ascending order; quality losses are shares of the
            uniform lowest precision's.
        plan: (efficiency, quality loss) of the current plan, or None.
        lowest: Names of the formats of the lowest precision.
    """
    figure = _new_figure(3.0)
    axes = figure.subplots()
    efficiencies = [efficiency for efficiency, _ in points]
    losses = [loss for _, loss in points]
    axes.plot(efficiencies, losses, "o-", color=LINE, markersize=3, label="best plan")
    if plan is not None:
        efficiency, loss = plan
        style: dict[str, Any] = {"markersize": 14, "markeredgecolor": SURFACE}
        axes.plot(efficiency, loss, "*", color=WARNING, **style, label="current plan")
    axes.set_ylim(bottom=0.0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"efficiency: share of FLOPs in {lowest}")
    _finish(figure, axes, f"quality loss\n100%: all linears in {lowest}")
    return figure


@matplotlib.rc_context(STYLE)
def recipes_on_frontier(
    points: Points, recipes: Sequence[tuple[str, float, float]], lowest: str
) -> Figure:
    """Draw recipes beside the least quality loss at each efficiency.

    Args:
        points: (efficiency, quality loss) of SNIP's plans in ascending order.
        recipes: (name, efficiency, quality loss); names are numbered in the legend.
        lowest: Names of the formats of the lowest precision.
    """
    figure = _new_figure(4.0)
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), "o-", color=LINE, markersize=3, label="SNIP")
    for number, (name, efficiency, loss) in enumerate(recipes, start=1):
        style: dict[str, Any] = {"color": WARNING, "markersize": 6}
        axes.plot(efficiency, loss, "s", **style, label=f"{number}: {label(name)}")
        axes.annotate(str(number), (efficiency, loss), (4, 4), textcoords="offset points")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"efficiency: share of FLOPs in {lowest}")
    _finish(figure, axes, "quality loss")
    return figure
