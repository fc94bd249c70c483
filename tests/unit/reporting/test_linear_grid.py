"""Where linears stand in a grid."""

import numpy as np

from megatron_snip.reporting.linear_grid import make_grid


def test_layers_are_rows_in_numeric_order_and_kinds_are_columns() -> None:
    names = [
        f"decoder.layers.{layer}.{kind}"
        for layer in (10, 2)
        for kind in ("self_attention.linear_qkv", "mlp.linear_fc1")
    ]
    grid = make_grid(names)
    assert grid.rows == ("2", "10") and grid.columns == ("qkv", "fc1")
    table = grid.table({names[0]: 1.0, names[3]: None, "unknown": 5.0})
    assert table[1, 0] == 1.0 and np.isnan(table).sum() == 3


def test_prefixes_stay_where_kinds_would_look_alike() -> None:
    grid = make_grid(["decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.experts.linear_fc1"])
    assert grid.columns == ("fc1", "experts.fc1")
    grid = make_grid(["d.layers.0.mlp.linear_x", "d.layers.0.self_attention.linear_x"])
    assert grid.columns == ("mlp.x", "x")


def test_several_blocks_and_odd_names_lose_nothing() -> None:
    grid = make_grid(["decoder.layers.0.a.linear_x", "mtp.layers.0.a.linear_x", "odd"])
    assert grid.rows == ("decoder 0", "mtp 0", "odd")
    assert len(set(grid.places.values())) == 3


def test_labels_stay_short_enough_to_draw() -> None:
    grid = make_grid([f"decoder.layers.0.{'x' * 300}", "?" * 300])
    assert max(map(len, grid.rows)) == max(map(len, grid.columns)) == 24
