"""Pictures of divergences: how much each linear would be hurt by each option.

Rows are layers, columns kinds of linears; the color is the logarithm of the divergence, on one
scale for all options, so that formats can be compared. Cells that could not be measured stay empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from megatron_snip.reporting.divergence_record import DivergenceRecord, Kind
from megatron_snip.reporting.figures.canvas import Canvas, mesh_style, short
from megatron_snip.reporting.linear_grid import LinearGrid, make_grid

TITLES: dict[Kind, str] = {
    "loss_divergence": "loss divergence",
    "weight_divergence": "weight divergence",
}


def quantizing_options(record: DivergenceRecord) -> tuple[str, ...]:
    """Return the uniform options that change anything: bf16 diverges from nothing."""
    return tuple(option for option in record.uniform_options if option != "bf16")


def divergence_maps(canvas: Canvas, record: DivergenceRecord) -> Figure:
    """Draw both divergences by option.

    Args:
        canvas: what to draw on.
        record: of one refresh, with at least one quantizing option.
    """
    options = quantizing_options(record)
    grid = make_grid(row.name for row in record.linears)
    each = 0.3 if len(grid.rows) <= 8 else 0.2
    rows = float(np.clip(len(grid.rows) * each, 0.9, 3.0 if canvas.narrow else 4.5))
    figure = canvas.figure(2 * (rows + 0.55) if not canvas.narrow else 2 * (rows + 0.8))
    panels = figure.subplots(2, len(options), sharex=True, sharey=True, squeeze=False)
    for line, kind in zip(panels, TITLES, strict=True):
        tables = [grid.table(record.values(option, kind)) for option in options]
        scale = _scale(tables)
        for axes, option, table in zip(line, options, tables, strict=True):
            drawn = _map(canvas, axes, grid, table, scale)
            axes.set_title(f"{TITLES[kind]}, {option}" if not canvas.narrow else option)
        bar = figure.colorbar(drawn, ax=list(line), pad=0.02, aspect=14)
        _label_bar(bar, scale, TITLES[kind] if canvas.narrow else None)
        line[0].set_ylabel("layer")
    return figure


def _scale(tables: list[NDArray[np.float64]]) -> LogNorm:
    """One logarithmic scale for all tables; what is not positive has no color on it."""
    values = np.concatenate([table[table > 0] for table in tables] or [np.ones(1)])
    if values.size == 0:
        return LogNorm(0.1, 1.0)
    low, high = float(values.min()), float(values.max())
    return LogNorm(low, high if high > low else low * 10)


def _map(
    canvas: Canvas, axes: Any, grid: LinearGrid, table: NDArray[np.float64], scale: LogNorm
) -> Any:
    theme = canvas.theme
    axes.set_facecolor(theme.faint)
    drawn = axes.pcolormesh(
        np.ma.masked_where(~(table > 0), table),
        cmap="viridis",
        norm=scale,
        **mesh_style(canvas, table.shape[0], table.size, gap=True),
    )
    axes.set_ylim(table.shape[0], 0)
    every = max(1, -(-len(grid.rows) // 20))
    shown = range(0, len(grid.rows), every)
    axes.set_yticks([k + 0.5 for k in shown], [grid.rows[k] for k in shown])
    turned = canvas.narrow and sum(map(len, grid.columns)) > 14
    centers = np.arange(len(grid.columns)) + 0.5
    axes.set_xticks(centers, grid.columns, rotation=90 if turned else 0)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return drawn


def _label_bar(bar: Any, scale: LogNorm, label: str | None) -> None:
    assert scale.vmin is not None and scale.vmax is not None
    decades = np.log10(scale.vmax / scale.vmin)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0) if decades < 2 else (1.0,)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(length=2)
    if label is not None:
        bar.set_label(label)
