"""Pictures of plans: which format each GEMM of each linear takes, now and over time.

Rows are layers, from the input downwards; columns are kinds of linears, each with its three GEMMs
where they differ; the color is the format (`palette.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatron_snip.options import Option
from megatron_snip.reporting.figures.canvas import Canvas, mesh_style, step_ticks
from megatron_snip.reporting.figures.palette import NAMES, format_legend, format_map
from megatron_snip.reporting.linear_grid import LinearGrid, make_grid
from megatron_snip.reporting.run_record import PlanSpan
from megatron_snip.types import Gemm


def gemms_shown(options: Iterable[Option]) -> tuple[Gemm, ...]:
    """Return all GEMMs where some option mixes formats, else only fprop, which then shows all."""
    mixed = any(len(set(option.formats)) > 1 for option in options)
    return tuple(Gemm) if mixed else (Gemm.FPROP,)


def formats_in(options: Iterable[Option]) -> set[str]:
    """Return the formats that occur."""
    return {name for option in options for name in option.formats}


def plan_map(canvas: Canvas, linears: Mapping[str, Option]) -> Figure:
    """Draw one plan.

    Args:
        canvas: what to draw on.
        linears: option of each linear, in the model's order.
    """
    grid, gemms = make_grid(linears), gemms_shown(linears.values())
    cells = np.full((len(grid.rows), len(grid.columns) * len(gemms)), np.nan)
    for k, gemm in enumerate(gemms):
        cells[:, k :: len(gemms)] = format_table(grid, linears, gemm)
    figure = canvas.figure(_height(len(grid.rows), canvas) + 0.75)
    axes = figure.subplots()
    edges = np.arange(cells.shape[1] + 1) / len(gemms)
    _cells(canvas, axes, edges, cells, gap=True)
    _name_rows(axes, grid, canvas)
    axes.set_ylabel("layer")
    axes.xaxis.tick_top()
    centers = (edges[:-1] + edges[1:]) / 2
    if len(gemms) == 1:
        axes.set_xticks(centers, grid.columns)
    else:
        axes.set_xticks(centers, [gemm[0] for _ in grid.columns for gemm in gemms])
        for k, column in enumerate(grid.columns):
            axes.text(k + 0.5, 1.0, column + "\n", transform=axes.get_xaxis_transform(), **_TITLE)
            if k:
                axes.axvline(k, color=canvas.theme.surface, linewidth=4)
    axes.tick_params(length=0)
    _legend(figure, canvas, formats_in(linears.values()), len(gemms) > 1)
    return figure


def plan_history(canvas: Canvas, spans: Sequence[PlanSpan]) -> Figure:
    """Draw the plans in force over the training steps: a panel for each kind of linear and GEMM.

    Args:
        canvas: what to draw on.
        spans: at least one, in order.
    """
    grid = make_grid(dict.fromkeys(name for span in spans for name in span.linears))
    options = {option for span in spans for option in span.linears.values()}
    gemms = gemms_shown(options)
    down, across = _panels(len(grid.columns), len(gemms), canvas.narrow)
    figure = canvas.figure(down * (_height(len(grid.rows), canvas) + 0.45) + 0.5)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    edges = np.array([span.start for span in spans] + [spans[-1].end], np.float64)
    for k, axes in enumerate(panels.flat):
        column, gemm = _panel(k, len(grid.columns), len(gemms), canvas.narrow)
        if column >= len(grid.columns):
            axes.set_axis_off()
            continue
        tables = [format_table(grid, span.linears, gemms[gemm]) for span in spans]
        cells = np.stack([table[:, column] for table in tables], axis=1)
        _cells(canvas, axes, edges, cells, gap=False)
        for edge in edges[1:-1] if len(spans) <= 40 else ():
            axes.axvline(edge, color=canvas.theme.surface, linewidth=0.8)
        name = grid.columns[column]
        axes.set_title(name if len(gemms) == 1 else f"{name}, {gemms[gemm]}")
        _name_rows(axes, grid, canvas)
        axes.xaxis.set_major_locator(step_ticks(4 if across > 1 else 8))
        axes.label_outer()
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel("layer", fontsize="medium")
    _legend(figure, canvas, formats_in(options), False)
    return figure


def format_table(
    grid: LinearGrid, linears: Mapping[str, Option], gemm: Gemm
) -> NDArray[np.float64]:
    """Return [rows, columns]: the index in `palette.NAMES` of one GEMM's format, NaN for none."""
    return grid.table({name: NAMES.index(option[gemm]) for name, option in linears.items()})


_TITLE: dict[str, Any] = {"ha": "center", "va": "bottom", "linespacing": 1.5}


def _panels(columns: int, gemms: int, narrow: bool) -> tuple[int, int]:
    """Return panels (down, across): kinds across and GEMMs down, or as a phone has room."""
    if gemms > 1:
        return (columns, gemms) if narrow else (gemms, columns)
    across = min(columns, 2 if narrow else 6)
    return -(-columns // across), across


def _panel(k: int, columns: int, gemms: int, narrow: bool) -> tuple[int, int]:
    """Return (column, gemm) of the k-th panel."""
    if gemms == 1:
        return k, 0
    return (k // gemms, k % gemms) if narrow else (k % columns, k // columns)


def _height(rows: int, canvas: Canvas) -> float:
    """Inches that this many layers take."""
    each = 0.34 if rows <= 8 else 0.2
    return float(np.clip(rows * each, 0.6, 3.0 if canvas.narrow else 4.5))


def _cells(
    canvas: Canvas, axes: Any, edges: NDArray[np.float64], cells: NDArray[np.float64], gap: bool
) -> None:
    theme = canvas.theme
    axes.set_facecolor(theme.faint)
    axes.pcolormesh(
        edges,
        np.arange(cells.shape[0] + 1),
        np.ma.masked_invalid(cells),
        cmap=format_map(theme),
        vmin=-0.5,
        vmax=len(NAMES) - 0.5,
        **mesh_style(canvas, cells.shape[0], cells.size, gap),
    )
    axes.set_ylim(cells.shape[0], 0)
    axes.set_xlim(edges[0], edges[-1])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _name_rows(axes: Any, grid: LinearGrid, canvas: Canvas) -> None:
    """Label as many layers as have room."""
    every = max(1, -(-len(grid.rows) // (12 if canvas.narrow else 20)))
    shown = range(0, len(grid.rows), every)
    axes.set_yticks([k + 0.5 for k in shown], [grid.rows[k] for k in shown])
    axes.tick_params(axis="y", length=0)


def _legend(figure: Figure, canvas: Canvas, names: set[str], letters: bool) -> None:
    entries = format_legend(names, canvas.theme)
    title = "f fprop, d dgrad, w wgrad" if letters else None
    figure.legend(
        handles=entries,
        loc="outside upper right",
        ncols=len(entries),
        title=title,
        title_fontsize="small",
        handlelength=1.2,
        columnspacing=1.2,
    )
