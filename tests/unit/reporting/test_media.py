"""What writers show besides scalars; without matplotlib everything but pictures."""

import importlib.util
import logging
import math
from typing import Any

import pytest

from megatron_snip.log import forget_warnings
from megatron_snip.reporting import media
from megatron_snip.reporting.media import (
    divergence_figure,
    divergence_values,
    plan_figure,
    plan_rows,
)
from tests.unit.reporting.runs import Shape, config, plan_from, refresh_at

SHAPE = Shape(config(granularity="gemm"))
REFRESH = refresh_at(SHAPE, 2)
PLAN = plan_from(SHAPE, REFRESH)


def test_a_plan_is_a_row_a_linear_with_the_format_of_each_gemm() -> None:
    rows = plan_rows(PLAN)
    assert [row[0] for row in rows] == SHAPE.names
    assert rows[0][1:] == PLAN.linears[SHAPE.names[0]].formats


def test_histograms_are_of_logarithms_of_what_is_positive() -> None:
    values = divergence_values(REFRESH.divergences)
    lowest = [list(linear.options.values())[-1] for linear in REFRESH.divergences.linears]
    assert values["snip/divergence/loss_log10"] == [math.log10(d.loss_divergence) for d in lowest]
    assert divergence_values(refresh_at(Shape(config(formats="bf16")), 2).divergences) == {
        "snip/divergence/loss_log10": [],
        "snip/divergence/weight_log10": [],
    }


def test_pictures_are_opaque() -> None:
    with plan_figure(PLAN) as plan, divergence_figure(REFRESH) as maps:
        assert plan.get_facecolor()[3] == maps.get_facecolor()[3] == 1.0
        assert len(maps.axes) == 2 * 2 + 2  # two measures, two formats, two color bars


def test_without_matplotlib_there_are_no_pictures_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name == "matplotlib" else real(name)

    monkeypatch.setattr(media, "find_spec", find)
    forget_warnings()
    with caplog.at_level(logging.WARNING), plan_figure(PLAN) as one, plan_figure(PLAN) as two:
        assert one is None and two is None
    assert [record.message for record in caplog.records] == [
        "no pictures are logged: pip install 'megatron-snip[report]' for matplotlib"
    ]
