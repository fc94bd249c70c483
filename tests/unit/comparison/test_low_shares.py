"""Shares by GEMM, and maps that show them where they belong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_snip.comparison.low_shares import low_share_maps, low_shares, share_in
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.table import make_tables
from megatron_snip.reporting.figures.canvas import HALF, WIDE
from megatron_snip.trainer.config import linear_shapes
from megatron_snip.types import Gemm
from tests.unit.comparison.build import comparison, outcome

CONFIG = comparison(policies=("bf16", "fp8", "random", "snip-gemm"))
NAMES = [shape.name for shape in linear_shapes(CONFIG.train_config())]


def kept(contender: str, seed: int) -> dict[str, dict[str, float]]:
    if contender in ("bf16", "fp8"):
        return {name: {contender: 1.0} for name in NAMES}
    low = "fp8-fp3-fp3" if contender == "snip-gemm" else "fp3"
    return {**{name: {"fp8": 0.25, low: 0.75} for name in NAMES}, NAMES[seed]: {"fp8": 1.0}}


def test_shares_are_by_gemm_and_a_mean_over_seeds() -> None:
    schedule = make_schedule(CONFIG)
    found = {
        e.run.key: dataclasses.replace(outcome(e.run.key, 2.0), options=kept(e.contender, e.seed))
        for e in schedule.entries
    }
    (table,) = make_tables(schedule.entries, found)
    shares = low_shares(table, schedule.entries, found)
    assert list(shares) == ["random", "snip-gemm"]  # fp8 treats all linears alike
    assert shares["random"][NAMES[0]] == pytest.approx((0.375,) * 3)
    assert shares["random"][NAMES[-1]] == pytest.approx((0.75,) * 3)
    assert shares["snip-gemm"][NAMES[-1]] == pytest.approx((0.0, 0.75, 0.75))


def test_formats_of_as_many_bits_count_alike() -> None:
    options = {"fp4-fp8-fp4_rht": 0.5, "nvfp4": 0.25, "bf16": 0.25}
    found = [share_in(options, gemm, "fp4") for gemm in Gemm]
    assert found == pytest.approx([0.75, 0.25, 0.75])


@pytest.mark.parametrize("canvas", [WIDE, HALF])
def test_cells_are_where_their_gemm_is(canvas: Any) -> None:
    generator = np.random.default_rng(0)
    shares = {
        contender: {name: tuple(generator.uniform(size=3).tolist()) for name in NAMES}
        for contender in ("a", "b", "c", "d", "e")
    }
    with canvas.style():
        panels = low_share_maps(canvas, shares, "fp3").axes[:-1]  # the last is the color bar
    shown = [axes for axes in panels if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == list(shares)
    for axes, of_linears in zip(shown, shares.values(), strict=True):
        cells = np.asarray(axes.collections[0].get_array()).reshape(2, 12)
        for k, name in enumerate(NAMES):  # two layers of qkv, proj, fc1, fc2
            row, column = divmod(k, 4)
            assert cells[row, 3 * column : 3 * column + 3] == pytest.approx(of_linears[name])
        low, high = axes.get_ylim()
        assert low > high, "the first layer is at the top"
    labelled = [axes.xaxis.get_tick_params()["labelbottom"] for axes in shown]
    assert labelled == [False, True, True, True, True], "each column's lowest panel has names"
