"""Quality loss: both divergences in one number for each linear and option, as a planning problem.

    Q[l, q] = loss[l, q] / sum_l loss[l, lowest]  +  lambda * weight[l, q] / sum_l weight[l, lowest]

`lowest` is the uniform option of the lowest precision among the formats. If all entries are finite
and both sums positive, Q of the plan that gives it to every linear is 1 + lambda. An option whose Q
is not finite is forbidden for that linear, with a warning that names it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.divergence import (
    absolute_error,
    finite_sum,
    fprop_scale,
    loss_divergence,
    norm_bound,
    relative_error,
    weight_divergence,
)
from megatron_snip.files import without_nan
from megatron_snip.options import BF16, Option
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.statistics.records import LinearStatistics, StatisticsTable
from megatron_snip.topology import LinearInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptionDivergence:
    """Divergences of one option at one linear; NaN where a value could not be measured.

    Attributes:
        loss_divergence: score of the change of the loss, in units of the loss (divergence.py).
        weight_divergence: score of the change of the next updates, no unit (divergence.py).
        quality_loss: Q, or None if the option is forbidden.
        abs_error: the min-abs-err baseline's measure.
        rel_error: the min-rel-err baseline's measure.
    """

    loss_divergence: float
    weight_divergence: float
    quality_loss: float | None
    abs_error: float
    rel_error: float


@dataclass(frozen=True)
class DivergenceTable:
    """The divergences of a model at one iteration, the same on every rank.

    Attributes:
        statistics: from which they were computed.
        lowest_format: the lowest precision among the formats.
        linears: by linear, in the order of the statistics, and by option.
    """

    statistics: StatisticsTable
    lowest_format: str
    linears: dict[str, dict[Option, OptionDivergence]]

    def loss_divergence(self, plan: Mapping[str, Option]) -> float:
        """Return the sum over linears of a plan's loss divergences; BF16 has none."""
        found = (row.get(plan.get(name, BF16)) for name, row in self.linears.items())
        return sum(each.loss_divergence for each in found if each is not None)

    def of_lowest(self) -> list[OptionDivergence]:
        """Return each linear's divergences in the uniform lowest precision, in order.

        The last option stands in where there is no uniform one.
        """
        uniform = Option.uniform(self.lowest_format)
        return [row.get(uniform) or list(row.values())[-1] for row in self.linears.values()]


def divergence_table(
    table: StatisticsTable,
    options: Sequence[Option],
    lowest_format: str,
    config: SnipConfig,
    warn: bool = True,
) -> DivergenceTable:
    """Compute every option's divergences and quality loss at every linear.

    Args:
        table: the statistics.
        options: what every linear may choose.
        lowest_format: the lowest precision among the formats.
        config: `loss_divergence` and `weight_lambda` say how the divergences are combined.
        warn: whether to log what is forbidden; one rank of many is enough.
    """
    lowest, kappa = Option.uniform(lowest_format), fprop_scale(table.linears, lowest_format)
    loss_of = partial(loss_divergence, estimator=config.loss_divergence)
    weight_of = partial(weight_divergence, kappa=kappa)
    loss_sum = finite_sum(_or_nan(loss_of, linear, lowest) for linear in table.linears)
    weight_sum = finite_sum(_or_nan(weight_of, linear, lowest) for linear in table.linears)
    rows: dict[str, dict[Option, OptionDivergence]] = {}
    for linear in table.linears:
        found = rows[linear.name] = {}
        for option in options:
            loss, weight = (_or_nan(of, linear, option) for of in (loss_of, weight_of))
            quality = _share(loss, loss_sum)
            if config.weight_lambda > 0:  # what does not count cannot forbid
                quality += config.weight_lambda * _share(weight, weight_sum)
            found[option] = OptionDivergence(
                loss,
                weight,
                _allowed(quality, linear.name, option, warn),
                _or_nan(absolute_error, linear, option),
                _or_nan(relative_error, linear, option),
            )
    return DivergenceTable(table, lowest_format, rows)


def planning_problem(table: DivergenceTable, target: float) -> PlanningProblem:
    """Return the planner's problem; its smallest allowed efficiency is `target`.

    An option saves its share of FLOPs in the lowest precision. Its scores are those of the
    baselines.
    """

    def cost(linear: LinearStatistics, option: Option, d: OptionDivergence) -> OptionCost:
        norms = _or_nan(norm_bound, linear, option)
        scores = {"abs_error": d.abs_error, "rel_error": d.rel_error, "norms": norms}
        saving = option.share_in(table.lowest_format)
        return OptionCost(quality_loss=d.quality_loss, saving=saving, scores=without_nan(scores))

    linears = (
        _choices(i, {str(o): cost(i, o, d) for o, d in table.linears[i.name].items()})
        for i in table.statistics.linears
    )
    return PlanningProblem(linears=tuple(linears), target=target)


def unmeasured_problem(
    linears: Sequence[LinearInfo], options: Sequence[Option], lowest_format: str, target: float
) -> PlanningProblem:
    """Return the problem before the first measurement: every quality loss is 0."""
    costs = {
        str(option): OptionCost(quality_loss=0.0, saving=option.share_in(lowest_format))
        for option in options
    }
    return PlanningProblem(linears=tuple(_choices(i, costs) for i in linears), target=target)


def _choices(i: LinearInfo, costs: dict[str, OptionCost]) -> LinearChoices:
    return LinearChoices(name=i.name, stage=i.stage, flops=i.flops_per_token, options=costs)


def divergences_dict(table: DivergenceTable) -> dict[str, Any]:
    """Return divergences and the statistics behind them as plain types (NaN becomes null)."""
    statistics = table.statistics.to_dict()
    linears = [
        {
            "name": linear["name"],
            "stage": linear["stage"],
            "flops": linear["flops_per_token"],
            "options": {str(o): vars(d) for o, d in table.linears[linear["name"]].items()},
            "statistics": linear,
        }
        for linear in statistics["linears"]
    ]
    head = {"version": 2, "iteration": statistics["iteration"], "loss": statistics["loss"]}
    return {**without_nan(head), "linears": without_nan(linears)}


def _or_nan(
    compute: Callable[[LinearStatistics, Option], float], linear: LinearStatistics, option: Option
) -> float:
    if linear.microbatches == 0 and option != BF16:  # no backward reached it
        return math.nan
    try:
        return compute(linear, option)
    except (KeyError, ValueError, OverflowError):  # not measured, or root of a negative
        return math.nan


def _share(value: float, total: float) -> float:
    if value == 0.0:
        return 0.0
    return value / total if total > 0 else math.nan


def _allowed(quality: float, name: str, option: Option, warn: bool) -> float | None:
    if math.isfinite(quality):
        return quality
    if warn:
        text = "option %s is forbidden for %s at this refresh: its quality loss is %s"
        logger.warning(text, option, name, quality)
    return None
