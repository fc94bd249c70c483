"""Plans made of a measuring run's files are those that a refresh would make."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_snip.comparison.measurement import plan_from, read_statistics
from megatron_snip.config import SnipConfig, make_config
from megatron_snip.divergence.quality import QualitySettings, divergence_table, divergences_dict
from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics, StatisticsTable

GENTLE = FormatStatistics()


def linear(layer: int, fisher: float, local: float) -> LinearStatistics:
    lowest = FormatStatistics(fisher=fisher, local_square=local, output_error_square=1.0 + layer)
    return LinearStatistics(
        f"decoder.layers.{layer}.mlp.linear_fc1",
        0,
        64,
        128,
        6.0 * 64 * 128,
        microbatches=1.0,
        tokens=64.0,
        output_square=8.0,
        update_square=2.5,
        formats={"fp8": GENTLE, "fp4": lowest},
    )


def table(last: float) -> StatisticsTable:
    """Three linears; fp4 hurts the first one's loss most and the second one's weights most."""
    return StatisticsTable(6, 3.5, (linear(0, 4.0, 1.0), linear(1, 1.0, 9.0), linear(2, 2.0, last)))


def snip(**values: object) -> SnipConfig:
    given = {"policy": "snip", "weight_lambda": 0.0, "efficiency_target": 0.6}
    return make_config({**given, **values})


def written(path: Path, statistics: StatisticsTable) -> Path:
    c = snip()
    quality = QualitySettings(c.options, "fp4", c.loss_join, c.weight_lambda)
    content = divergences_dict(divergence_table(statistics, quality, warn=False), statistics)
    path.write_text(json.dumps(content, allow_nan=False))
    return path


def in_fp8(plan: PrecisionPlan) -> list[int]:
    options = [plan.linears[f"decoder.layers.{k}.mlp.linear_fc1"] for k in range(3)]
    return [k for k, option in enumerate(options) if option == Option.uniform("fp8")]


def test_statistics_survive_the_file(tmp_path: Path) -> None:
    found = read_statistics(written(tmp_path / "6.json", table(math.nan)))
    assert found.linears[:2] == table(1.0).linears[:2]
    assert (found.step, found.loss) == (6, 3.5)
    assert math.isnan(found.linears[2].formats["fp4"].local_square)


def test_a_plan_follows_the_contenders_way_of_joining(tmp_path: Path) -> None:
    found = read_statistics(written(tmp_path / "6.json", table(1.0)))
    by_loss = plan_from(found, snip())
    assert by_loss.step == 6
    assert in_fp8(by_loss) == [0]
    assert in_fp8(plan_from(found, snip(weight_lambda=100.0))) == [1]
    # Output errors grow with the layer: the last one is protected.
    assert in_fp8(plan_from(found, snip(policy="min-abs-err"))) == [2]


def test_what_was_not_measured_stays_gentle(tmp_path: Path) -> None:
    found = read_statistics(written(tmp_path / "6.json", table(math.nan)))
    assert in_fp8(plan_from(found, snip(weight_lambda=1.0))) == [2]


@pytest.mark.parametrize("text", ["{}", "[]", '{"linears": [{}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "6.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="holds no statistics"):
        read_statistics(path)
