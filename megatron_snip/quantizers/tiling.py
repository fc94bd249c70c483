"""Walking a matrix in pieces: whole tiles only, one tile shape a piece, small enough for a cache.

A [rows, cols] matrix under (tile_rows, tile_cols) tiles is cut into up to four regions (the body,
and short last tiles to the right, below and in the corner), each of one tile shape, and every
region into pieces of whole tiles. Quantizing a piece takes some ten passes over it, and drawing
its random numbers some eighty passes over an eighth of it; they run much faster in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

PIECE_ELEMENTS = 1 << 17
"""Elements of a piece, the fastest of 2^16 .. 2^18 measured: larger ones leave a 1 MiB cache,
smaller ones pay for starting some hundred operations a piece."""


@dataclass(frozen=True)
class Piece:
    """A part of a matrix that consists of whole tiles.

    Attributes:
        rows: rows of the matrix.
        cols: columns of the matrix.
        tile: (rows, cols) of every tile in the piece.
        tile_rows: the piece's rows in the grid of tiles.
        tile_cols: its columns there.
    """

    rows: range
    cols: range
    tile: tuple[int, int]
    tile_rows: range
    tile_cols: range

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return len(self.rows) * len(self.cols)

    def of(self, matrix: Tensor) -> Tensor:
        """The piece of a [rows, cols] matrix as [R, tile rows, C, tile cols], a view."""
        part = matrix[self.rows.start : self.rows.stop, self.cols.start : self.cols.stop]
        return self.split(part)

    def split(self, part: Tensor) -> Tensor:
        """View [piece rows, piece cols] as [R, tile rows, C, tile cols]."""
        return part.view(len(self.tile_rows), self.tile[0], len(self.tile_cols), self.tile[1])

    def of_grid(self, grid: Tensor) -> Tensor:
        """The piece's tiles in a [grid rows, grid cols] tensor as [R, 1, C, 1], a view."""
        part = grid[
            self.tile_rows.start : self.tile_rows.stop, self.tile_cols.start : self.tile_cols.stop
        ]
        return part[:, None, :, None]


def grid_shape(shape: tuple[int, int], tile: tuple[int, int]) -> tuple[int, int]:
    """Tiles along (rows, cols) of a matrix; the last may be short."""
    return -(-shape[0] // tile[0]), -(-shape[1] // tile[1])


def pieces(
    shape: tuple[int, int], tile: tuple[int, int], budget: int = PIECE_ELEMENTS
) -> Iterator[Piece]:
    """Yield pieces that cover a [rows, cols] matrix once.

    Args:
        shape: (rows, cols).
        tile: (rows, cols) of a tile, positive.
        budget: elements a piece should not exceed; a single tile may.
    """
    for row_span, tile_rows in _regions(shape[0], tile[0]):
        for col_span, tile_cols in _regions(shape[1], tile[1]):
            yield from _cut(row_span, tile_rows, col_span, tile_cols, tile, budget)


def _regions(size: int, tile: int) -> list[tuple[range, int]]:
    """(indices, tile size) of the whole tiles and of the short last one."""
    whole = size - size % tile
    spans = [(range(whole), tile), (range(whole, size), size - whole)]
    return [(span, length) for span, length in spans if len(span)]


def _cut(
    rows: range,
    tile_rows: int,
    cols: range,
    tile_cols: int,
    full_tile: tuple[int, int],
    budget: int,
) -> Iterator[Piece]:
    """Cut a region of one tile shape into pieces; rows of tiles first, wide before tall."""
    wide = min(len(cols), max(1, budget // (tile_rows * tile_cols)) * tile_cols)
    tall = min(len(rows), max(1, budget // (tile_rows * wide)) * tile_rows)
    for top in range(rows.start, rows.stop, tall):
        for left in range(cols.start, cols.stop, wide):
            row_range = range(top, min(top + tall, rows.stop))
            col_range = range(left, min(left + wide, cols.stop))
            yield Piece(
                row_range,
                col_range,
                (tile_rows, tile_cols),
                _grid_range(row_range, tile_rows, full_tile[0]),
                _grid_range(col_range, tile_cols, full_tile[1]),
            )


def _grid_range(span: range, tile: int, full_tile: int) -> range:
    first = span.start // full_tile
    return range(first, first + len(span) // tile)
