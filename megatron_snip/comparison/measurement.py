"""Plans from one measurement: what every measured contender starts from.

The measuring run has written divergences/<step>.json with the statistics behind it. From these, a
contender's divergences are joined its way, and its policy plans: the controller's own code, so that
a contender that plans here and one that refreshes in its run do the same.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality import QualitySettings, divergence_table, planning_problem
from megatron_snip.errors import UsageError
from megatron_snip.files import read_json
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics.records import (
    BASE_COLUMNS,
    FormatStatistics,
    LinearStatistics,
    StatisticsTable,
)


def read_statistics(path: Path) -> StatisticsTable:
    """Return the statistics behind a divergences file; what was not finite is NaN.

    Raises:
        UsageError: if the file cannot be read or holds something else.
    """
    value = read_json(path, "divergences file")
    try:
        linears = tuple(_linear(row["statistics"]) for row in value["linears"])
        return StatisticsTable(value["step"], value["loss"], linears)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"'{path}' holds no statistics ({error!r})") from None


def plan_from(statistics: StatisticsTable, snip: SnipConfig) -> PrecisionPlan:
    """Return the plan that a run with these settings makes of a measurement.

    Raises:
        InfeasiblePlanError: no plan reaches the target.
        UsageError: the statistics lack a format.
    """
    quality = QualitySettings(snip.options, snip.lowest_format, snip.loss_join, snip.weight_lambda)
    table = divergence_table(statistics, quality)
    problem = planning_problem(table, snip.lowest_format, snip.efficiency_target)
    settings = PlanSettings.from_config(snip)
    return make_plan(problem, settings, None, statistics.step + 1)


def _linear(row: dict[str, Any]) -> LinearStatistics:
    formats = {
        name: FormatStatistics(**{key: _number(value) for key, value in columns.items()})
        for name, columns in row["formats"].items()
    }
    sums = {key: _number(row[key]) for key in row if key in BASE_COLUMNS}
    whole = {key: value for key, value in row.items() if key not in sums}
    return LinearStatistics(**{**whole, **sums, "formats": formats})


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
