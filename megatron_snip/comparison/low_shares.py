"""What each contender puts into the lowest format, GEMM by GEMM: as numbers and as maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from megatron_snip.comparison.curves import drawn_rows, finished_of
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.run import Entry
from megatron_snip.comparison.table import Table
from megatron_snip.formats import get_format
from megatron_snip.options import Option
from megatron_snip.reporting.figures.canvas import Canvas, mesh_style
from megatron_snip.reporting.labels import label_of
from megatron_snip.reporting.linear_grid import make_grid
from megatron_snip.types import Gemm

Shares = Mapping[str, tuple[float, ...]]
"""By linear, the share of steps that fprop, dgrad and wgrad each ran in the lowest format."""


def low_shares(
    table: Table, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]
) -> dict[str, Shares]:
    """Return what each contender put into the lowest format, mean over its seeds.

    Left out are contenders that treat all linears alike, and runs that have not kept their options.
    """
    found: dict[str, Shares] = {}
    here = finished_of(table, entries, outcomes)
    for row in drawn_rows(table):
        runs = [outcomes[e.run.key].options for e in here if e.contender == row.contender]
        runs = [options for options in runs if options]
        shares = {
            name: tuple(
                math.fsum(share_in(options[name], gemm, table.lowest) for options in runs)
                / len(runs)
                for gemm in Gemm
            )
            for name in (runs[0] if runs else {})
        }
        if len({tuple(round(value, 9) for value in each) for each in shares.values()}) > 1:
            found[row.contender] = shares
    return found


def low_share_maps(canvas: Canvas, shares: Mapping[str, Shares], low: str) -> Figure:
    """Draw a map of layers and kinds of linears, each with its three GEMMs, for each contender.

    Args:
        canvas: what to draw on.
        shares: of `low_shares`, with at least one contender.
        low: name of the lowest format.
    """
    grid = make_grid(next(iter(shares.values())))
    across = min(len(shares), 2 if canvas.narrow else 4)
    lines = -(-len(shares) // across)
    height = float(np.clip(0.2 * len(grid.rows), 0.9, 3.0)) + 0.5
    figure = canvas.figure(lines * height + 0.3)
    panels = figure.subplots(lines, across, sharex=True, sharey=True, squeeze=False)
    edges = np.arange(len(grid.columns) * len(Gemm) + 1) / len(Gemm)
    for axes, (name, of_linears) in zip(panels.flat, shares.items(), strict=False):
        cells = np.full((len(grid.rows), len(edges) - 1), np.nan)
        for k in range(len(Gemm)):
            of_gemm = {linear: each[k] for linear, each in of_linears.items()}
            cells[:, k :: len(Gemm)] = grid.table(of_gemm)
        style = mesh_style(canvas, len(grid.rows), cells.size, gap=False)
        heights = np.arange(len(grid.rows) + 1)
        drawn = axes.pcolormesh(edges, heights, cells, cmap="cividis", vmin=0, vmax=1, **style)
        axes.set_title(label_of(name))
        axes.set_xticks(np.arange(len(grid.columns)) + 0.5, grid.columns)
        every = max(1, len(grid.rows) // 8)
        axes.set_yticks(np.arange(0, len(grid.rows), every) + 0.5, grid.rows[::every])
        axes.tick_params(length=0)
        for column in range(1, len(grid.columns)):
            axes.axvline(column, color=canvas.theme.surface, linewidth=3)
        for line in range(1, len(grid.rows) if len(grid.rows) <= 40 else 1):
            axes.axhline(line, color=canvas.theme.surface, linewidth=1.5)
    for axes in panels.flat[len(shares) :]:
        axes.set_visible(False)
    slanted = sum(map(len, grid.columns)) > 24
    for axes in panels.flat[
        max(0, len(shares) - across) : len(shares)
    ]:  # the lowest of each column
        axes.tick_params(labelbottom=True, labelrotation=0)
        if slanted:
            axes.tick_params(axis="x", labelrotation=60)
    panels[0, 0].invert_yaxis()
    for panel_line in panels:
        panel_line[0].set_ylabel("layer")
    figure.colorbar(drawn, ax=list(panels.flat), label=f"share of steps in {low}")
    return figure


def share_in(options: Mapping[str, float], gemm: Gemm, low: str) -> float:
    """Return the share of steps that a linear's GEMM ran in formats of as many bits as `low`."""
    bits = get_format(low).bits
    return math.fsum(
        share
        for name, share in options.items()
        if get_format(Option.parse(name)[gemm]).bits == bits
    )
