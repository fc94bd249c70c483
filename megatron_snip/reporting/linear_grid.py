"""LinearGrid: maps of a model's linears; rows are layers, columns are kinds of linears.

`decoder.layers.17.mlp.linear_fc1` is in row 17, column fc1. A name of another form gets a row of
its own.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip.errors import UsageError
from megatron_snip.reporting.style import FAINT, SURFACE
from megatron_snip.reporting.text import label
from megatron_snip.types import split_linear_name

Floats = NDArray[np.float64]


class LinearGrid:
    """Where each linear is in a map.

    Attributes:
        rows: Labels of the layers.
        columns: Labels of the kinds of linears, in the model's order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Place the linears with these names."""
        split = {name: _split(name) for name in names}
        blocks = list(dict.fromkeys(block for block, _, _ in split.values()))
        modules = list(dict.fromkeys(module for _, _, module in split.values()))
        layers = sorted({(blocks.index(block), layer) for block, layer, _ in split.values()})
        self._cells = {
            name: (layers.index((blocks.index(block), layer)), modules.index(module))
            for name, (block, layer, module) in split.items()
        }
        self.rows = []
        for index, layer in layers:
            block = label(blocks[index])
            if layer < 0:  # a name of another form
                self.rows.append(block)
            elif len(blocks) > 1:
                self.rows.append(f"{block} {layer}")
            else:
                self.rows.append(str(layer))
        short = [module.rpartition(".")[2].removeprefix("linear_") for module in modules]
        is_unique = len(set(short)) == len(short)
        self.columns = [label(name) for name in (short if is_unique else modules)]

    @property
    def height_in(self) -> float:
        """Inches of a map."""
        row_in = 0.3 if len(self.rows) <= 8 else 0.2
        return float(np.clip(len(self.rows) * row_in, 0.9, 4.5))

    def table(self, values: Mapping[str, float | None]) -> Floats:
        """Return [rows, columns]; NaN where there is no linear or no value."""
        table = np.full((len(self.rows), len(self.columns)), np.nan)
        for name, value in values.items():
            if value is not None and name in self._cells:
                table[self._cells[name]] = value
        return table

    def draw(self, axes: Any, edges: Floats, cells: Floats, **colors: Any) -> Any:
        """Draw a map; return matplotlib's mesh.

        Args:
            axes: The axes to draw on.
            edges: The x of the cells' edges, [columns + 1].
            cells: The values, [rows, columns]; NaN has no color. The first row is at the top.
            colors: Arguments of `pcolormesh` that color the values.
        """
        style: dict[str, Any] = {"edgecolors": SURFACE, "linewidth": 1.0}
        if cells.size > 600:  # as shapes they would make a large file; these are pixels
            style = {"rasterized": True}
        axes.set_facecolor(FAINT)
        heights = np.arange(cells.shape[0] + 1)
        mesh = axes.pcolormesh(edges, heights, np.ma.masked_invalid(cells), **style, **colors)
        axes.set_ylim(cells.shape[0], 0)
        axes.set_xlim(edges[0], edges[-1])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        step = max(1, math.ceil(len(self.rows) / 20))  # at most 20 labels
        named = range(0, len(self.rows), step)
        axes.set_yticks([k + 0.5 for k in named], [self.rows[k] for k in named])
        return mesh


def _split(name: str) -> tuple[str, int, str]:
    try:
        return split_linear_name(name)
    except UsageError:
        return name, -1, ""
