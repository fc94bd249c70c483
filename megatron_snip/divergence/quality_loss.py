"""Quality loss: both divergences in one number for each linear and option, as a planning problem.

    Q[l, q] = loss[l, q] / sum_l loss[l, lowest]  +  lambda * weight[l, q] / sum_l weight[l, lowest]

`lowest` is the uniform option of the lowest precision among the formats, so Q of the uniform
lowest plan is 1 + lambda whatever the units. An entry that is NaN, infinite or missing forbids that
option for that linear, with a warning that names it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_snip.config import LossDivergence, SnipConfig
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
from megatron_snip.formats import lowest_precision
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
class LinearDivergence:
    """All options of one linear.

    Attributes:
        statistics: of the linear.
        options: by option, in the order of the options asked for.
    """

    statistics: LinearStatistics
    options: dict[Option, OptionDivergence]

    @property
    def name(self) -> str:
        """Layout-independent name of the linear."""
        return self.statistics.name


@dataclass(frozen=True)
class DivergenceTable:
    """The divergences of a model at one iteration, the same on every rank."""

    iteration: int
    linears: tuple[LinearDivergence, ...]

    def loss_divergence(self, plan: Mapping[str, Option]) -> float:
        """Return the sum over linears of a plan's loss divergences; BF16 has none."""
        found = (row.options.get(plan.get(row.name, BF16)) for row in self.linears)
        return sum(each.loss_divergence for each in found if each is not None)

    def of_lowest(self) -> list[OptionDivergence]:
        """Return each linear's divergences in the uniform lowest precision, in order.

        Of several formats of as few bits it is the first; the last option where none is uniform.
        """
        found = []
        for linear in self.linears:
            names = dict.fromkeys(name for option in linear.options for name in option.formats)
            uniform = Option.uniform(lowest_precision(tuple(names)).name)
            found.append(linear.options.get(uniform) or list(linear.options.values())[-1])
        return found


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
    lowest, estimator = Option.uniform(lowest_format), config.loss_divergence
    loss_sum = finite_sum(_loss(linear, lowest, estimator) for linear in table.linears)
    kappa = fprop_scale(table.linears, lowest_format)
    weight_sum = finite_sum(_weight(linear, lowest, kappa) for linear in table.linears)
    rows = []
    for linear in table.linears:
        found = {}
        for option in options:
            loss, weight = _loss(linear, option, estimator), _weight(linear, option, kappa)
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
        rows.append(LinearDivergence(linear, found))
    return DivergenceTable(table.iteration, tuple(rows))


def planning_problem(table: DivergenceTable, lowest_format: str, target: float) -> PlanningProblem:
    """Return the planner's problem.

    Args:
        table: the divergences; the options' scores are those of the baselines.
        lowest_format: the format whose share of FLOPs is an option's saving.
        target: smallest allowed efficiency.
    """
    rows = (
        (
            row.statistics,
            {
                str(option): OptionCost(
                    quality_loss=d.quality_loss,
                    saving=option.share_in(lowest_format),
                    scores=without_nan({"abs_error": d.abs_error, "rel_error": d.rel_error})
                    | without_nan({"norms": _or_nan(norm_bound, row.statistics, option)}),
                )
                for option, d in row.options.items()
            },
        )
        for row in table.linears
    )
    return _problem(rows, target)


def unmeasured_problem(
    linears: Sequence[LinearInfo], options: Sequence[Option], lowest_format: str, target: float
) -> PlanningProblem:
    """Return the problem before the first measurement: every quality loss is 0."""
    costs = {
        str(option): OptionCost(quality_loss=0.0, saving=option.share_in(lowest_format))
        for option in options
    }
    return _problem(((linear, costs) for linear in linears), target)


def _problem(
    rows: Iterable[tuple[LinearInfo | LinearStatistics, dict[str, OptionCost]]], target: float
) -> PlanningProblem:
    linears = (
        LinearChoices(name=i.name, stage=i.stage, flops=i.flops_per_token, options=costs)
        for i, costs in rows
    )
    return PlanningProblem(linears=tuple(linears), target=target)


def divergences_dict(table: DivergenceTable, statistics: StatisticsTable) -> dict[str, Any]:
    """Return divergences and the statistics behind them as plain types (NaN becomes null)."""
    raw = statistics.to_dict()
    by_name = {linear["name"]: linear for linear in raw["linears"]}
    linears = [
        {
            "name": linear.name,
            "stage": linear.statistics.stage,
            "flops": linear.statistics.flops_per_token,
            "options": {str(o): vars(d) for o, d in linear.options.items()},
            "statistics": by_name[linear.name],
        }
        for linear in table.linears
    ]
    head = {"version": 2, "iteration": table.iteration, "loss": raw["loss"]}
    return {**without_nan(head), "linears": without_nan(linears)}


def _loss(linear: LinearStatistics, option: Option, estimator: LossDivergence) -> float:
    return _or_nan(loss_divergence, linear, option, estimator)


def _weight(linear: LinearStatistics, option: Option, kappa: float) -> float:
    return _or_nan(weight_divergence, linear, option, kappa)


def _or_nan(
    compute: Callable[..., float], linear: LinearStatistics, option: Option, *arguments: Any
) -> float:
    if linear.microbatches == 0 and option != BF16:  # no backward reached it
        return math.nan
    try:
        return compute(linear, option, *arguments)
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
