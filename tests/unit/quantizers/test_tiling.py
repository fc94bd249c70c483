"""Pieces cover a matrix once, in whole tiles."""

import pytest
import torch

from megatron_snip.quantizers.tiling import grid_shape, pieces

SHAPES = [(0, 5), (5, 0), (1, 1), (128, 256), (130, 300), (127, 129), (7, 1000)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128), (1, 16), (3, 5)])
@pytest.mark.parametrize("budget", [1, 600, 1 << 17])
def test_every_element_and_every_tile_once(shape, tile, budget):
    seen, grid = torch.zeros(shape), torch.zeros(grid_shape(shape, tile))
    numbers = torch.arange(grid.numel()).view(grid.shape)
    owner = torch.full(shape, -1)
    for piece in pieces(shape, tile, budget):
        piece.of(seen).add_(1)
        piece.of_grid(grid).add_(1)
        piece.of(owner).copy_(piece.of_grid(numbers).expand_as(piece.of(owner)))
    assert (seen == 1).all() and (grid == 1).all()
    rows, cols = torch.arange(shape[0]) // tile[0], torch.arange(shape[1]) // tile[1]
    assert torch.equal(owner, rows[:, None] * grid.shape[1] + cols)


def test_pieces_keep_to_their_budget_where_tiles_allow():
    sizes = [piece.numel for piece in pieces((1000, 1000), (128, 1), 1 << 12)]
    assert max(sizes) <= 1 << 12
    assert [p.numel for p in pieces((128, 128), (128, 128), 5)] == [128 * 128]
