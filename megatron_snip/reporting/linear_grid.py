"""LinearGrid: the linears of a model as a table, layers down and kinds of linears across.

    decoder.layers.17.mlp.linear_fc1   ->   row "17", column "fc1"

Names that do not have the form of a linear's name get a row of their own, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_snip.reporting.labels import label_of
from megatron_snip.types import split_linear_name

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LinearGrid:
    """Where each linear stands.

    Attributes:
        rows: labels of the layers, from the input upwards.
        columns: labels of the kinds, in the order in which the model lists them.
        places: (row, column) of each linear.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: dict[str, tuple[int, int]]

    def table(self, values: Mapping[str, float | None]) -> Floats:
        """Return [rows, columns]; NaN where there is no linear or no value."""
        table = np.full((len(self.rows), len(self.columns)), np.nan)
        for name, value in values.items():
            if value is not None and name in self.places:
                table[self.places[name]] = value
        return table


def make_grid(names: Iterable[str]) -> LinearGrid:
    """Return the grid of these linears, in the order in which they are given."""
    split = {name: _split(name) for name in names}
    blocks = list(dict.fromkeys(block for block, _, _ in split.values()))
    layers = sorted({(blocks.index(block), layer) for block, layer, _ in split.values()})
    modules = list(dict.fromkeys(module for _, _, module in split.values()))
    rows = {place: k for k, place in enumerate(layers)}
    columns = {module: k for k, module in enumerate(modules)}
    places = {
        name: (rows[blocks.index(block), layer], columns[module])
        for name, (block, layer, module) in split.items()
    }
    labels = [_row_label(blocks[index], layer, len(blocks) > 1) for index, layer in layers]
    return LinearGrid(tuple(labels), _column_labels(modules), places)


def _split(name: str) -> tuple[str, int, str]:
    try:
        return split_linear_name(name)
    except ValueError:
        return name, -1, ""


def _row_label(block: str, layer: int, several: bool) -> str:
    if layer < 0:
        return label_of(block)
    return f"{label_of(block)} {layer}" if several else str(layer)


def _column_labels(modules: list[str]) -> tuple[str, ...]:
    """`self_attention.linear_qkv` is qkv, `mlp.experts.linear_fc1` is experts.fc1."""
    labels = [module.replace("linear_", "") for module in modules]
    for prefix in ("self_attention.", "mlp."):
        shorter = [label.removeprefix(prefix) for label in labels]
        if len(set(shorter)) == len(labels):
            labels = shorter
    return tuple(map(label_of, labels))
