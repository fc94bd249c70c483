"""How much a linear's options hurt: divergences, quality loss, and the planner's problem.

A GEMM multiplies the operands A and B, and C is the third of X, W and G. The error of an operand in
a format is measured once: X and W in the tiles of fprop, G in those of dgrad. It is used in all
GEMMs. To first order in the errors, a GEMM changes the loss by at most (Frobenius norms)

    norms_GEMM = |C| (|A| |Q(B) - B| + |Q(A) - A| |B|)

for the format that the option q gives to the GEMM; 0 for bf16. The two divergences of q at a linear
l are sums of these bounds:

    loss_l(q)   = norms_fprop
    weight_l(q) = norms_dgrad + norms_wgrad

Both are scores that order linears and options, and no predictions. Plugins add others. The baseline
policies read

    abs_error  = sum over GEMMs of |Q(A) - A| + |Q(B) - B|
    rel_error  = sum over GEMMs of |Q(A) - A| / |A| + |Q(B) - B| / |B|
    norms      = norms_fprop + norms_dgrad + norms_wgrad

The functions that compute scores raise KeyError if a format of the option was not measured,
ValueError if a sum under a root is negative, and OverflowError if one is too large.
`divergence_table` makes NaN of these.

Quality loss is both divergences in one number:

    Q[l, q] = loss[l, q] / sum_l loss[l, lowest]  +  lambda * weight[l, q] / sum_l weight[l, lowest]

`lowest` is the uniform option of the lowest precision among the formats. If all entries are finite
and both sums positive, a plan with `lowest` in every linear has Q = 1 + lambda. An option whose Q
is not finite is forbidden for that linear, with a warning. Where this would forbid a linear's pin,
or without a pin the option of the most bits that it can run, the linear keeps that option: an
unknown number must not leave it in a lower precision. A sum of 0 makes all its shares 0.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError, did_you_mean
from megatron_snip.files import read_json, without_nan
from megatron_snip.log import launched_rank, log_failure, warn_once
from megatron_snip.options import BF16, Option, Refusals
from megatron_snip.planning.fixed import FixedLinears
from megatron_snip.planning.problem import (
    MAX_MAGNITUDE,
    SQUARES,
    LinearChoices,
    OptionCost,
    PlanningProblem,
    norms_score,
)
from megatron_snip.statistics.records import (
    SCHEMA_VERSION,
    LinearStatistics,
    StatisticsTable,
    named_statistics,
)
from megatron_snip.topology import LinearInfo
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptionDivergence:
    """Divergences of one option at one linear; NaN where a value could not be measured.

    Attributes:
        loss_divergence: Score of the change of the loss through fprop, in units of the loss.
        weight_divergence: Score of the change of the gradients, in units of the loss.
        quality_loss: Q, or None if the option is forbidden.
        abs_error: Score of the baseline min-abs-err.
        rel_error: Score of the baseline min-rel-err, without unit.
    """

    loss_divergence: float
    weight_divergence: float
    quality_loss: float | None
    abs_error: float
    rel_error: float


@dataclass(frozen=True)
class DivergenceTable:
    """The divergences of a model by the running mean of its measurements, the same on every rank.

    Attributes:
        statistics: The statistics that they were computed from.
        lowest_format: The lowest precision among the formats.
        linears: The divergences by linear, in the order of the statistics, and by option.
    """

    statistics: StatisticsTable
    lowest_format: str
    linears: dict[str, dict[Option, OptionDivergence]]

    def loss_divergence(self, plan: Mapping[str, Option]) -> float:
        """Return the sum over linears of a plan's loss divergences; NaN if one of them is.

        An option that the table does not have, such as BF16, counts as 0.
        """
        found = (row.get(plan.get(name, BF16)) for name, row in self.linears.items())
        return sum(each.loss_divergence for each in found if each is not None)

    def of_lowest(self) -> list[OptionDivergence]:
        """Return each linear's divergences in the uniform lowest precision, in model order.

        Where that is not among the options of the run (fp8,fp8-fp4-fp4), the last option stands in,
        which has the fewest bits (`enumerate_options`).
        """
        uniform = Option.uniform(self.lowest_format)
        return [row.get(uniform) or list(row.values())[-1] for row in self.linears.values()]

    def most_fragile(self, most: int) -> tuple[str, ...]:
        """Return the linears with the largest quality loss in the lowest precision, largest first.

        Args:
            most: how many to return; those without a quality loss do not count.
        """
        losses = zip(self.linears, self.of_lowest(), strict=True)
        known = [(name, each.quality_loss) for name, each in losses if each.quality_loss]
        known.sort(key=lambda found: -found[1])
        return tuple(name for name, _ in known[:most])


def divergence_table(
    table: StatisticsTable,
    options: Sequence[Option],
    lowest_format: str,
    config: SnipConfig,
    refusals: Refusals | None = None,
    fixed: FixedLinears | None = None,
    warn: bool = True,
    job: Mapping[str, Option] = MappingProxyType({}),
) -> DivergenceTable:
    """Compute every option's divergences and quality loss at every linear.

    Args:
        table: The statistics.
        options: The options that a linear may choose, in the order of `enumerate_options`. A linear
            keeps one option, if no backward reached it or that option's quality loss is not finite:
            the one that it is fixed to; else, if no backward reached it, what the job itself runs,
            also if that is none of these; else the one of the most bits that it can run.
        lowest_format: The lowest precision among the formats.
        config: SNIP's settings, of which `loss_divergence`, `weight_divergence` and
            `weight_lambda` are used.
        refusals: The options that linears cannot run.
        fixed: The linears whose option is fixed.
        warn: Whether to log what is forbidden; one rank of many is enough.
        job: The option that stands for what the job itself runs, by linear. For linears that are
            absent it is the one of the most bits that they can run.
    """
    lowest = Option.uniform(lowest_format)
    loss_of = _named("loss_divergence", config.loss_divergence, LOSS_DIVERGENCES)
    weight_of = _named("weight_divergence", config.weight_divergence, WEIGHT_DIVERGENCES)
    loss_sum = finite_sum(_or_nan(loss_of, linear, lowest) for linear in table.linears)
    weight_sum = finite_sum(_or_nan(weight_of, linear, lowest) for linear in table.linears)

    def divergences_of(linear: LinearStatistics, option: Option) -> OptionDivergence:
        loss = _or_nan(loss_of, linear, option)
        weight = _or_nan(weight_of, linear, option)
        quality = _share(loss, loss_sum)
        # With lambda 0 a weight divergence that is not finite forbids nothing.
        if config.weight_lambda > 0:
            quality += config.weight_lambda * _share(weight, weight_sum)
        return OptionDivergence(
            loss_divergence=loss,
            weight_divergence=weight,
            quality_loss=quality if abs(quality) <= MAX_MAGNITUDE else None,  # NaN is not
            abs_error=_or_nan(absolute_error, linear, option),
            rel_error=_or_nan(relative_error, linear, option),
        )

    linears: dict[str, dict[Option, OptionDivergence]] = {}
    unreached: dict[str, Option] = {}
    unknown: dict[str, Option] = {}
    forbidden: list[str] = []
    for linear in table.linears:
        own = (fixed or {}).get(linear.name)
        pin = None if own is None else own.option
        kept = pin or _highest(linear.name, options, refusals or {})
        if not _was_measured(linear):
            kept = pin or job.get(linear.name) or kept
            unreached[linear.name] = kept
            choices = dict.fromkeys((*options, kept))
            by_option = {option: _unmeasured_divergence(option == kept) for option in choices}
        else:
            by_option = {option: divergences_of(linear, option) for option in options}
            without = [option for option, row in by_option.items() if row.quality_loss is None]
            if kept in without:
                unknown[linear.name] = kept
                for option, row in by_option.items():
                    known = 0.0 if option == kept else None
                    by_option[option] = replace(row, quality_loss=known)
            elif pin is None:
                forbidden += [
                    f"option {option} is forbidden for {linear.name}" for option in without
                ]
        linears[linear.name] = by_option
    if warn:
        if unreached:
            # Frozen layers, or linears that Megatron never calls: the attention of DSA multiplies
            # the weight of `linear_kv_up_proj` itself. The same linears at each refresh are
            # reported once.
            first = next(iter(unreached))
            warn_once(
                logger,
                f"no backward reached {len(unreached)} of {len(table.linears)} linears, such as "
                f"{first} (frozen, or never called?): they are not planned, and get "
                f"{unreached[first]}",
            )
        _warn_about(unknown, len(table.linears), "no finite quality loss for", "a statistic is NaN")
        if forbidden:
            text = "%s at this refresh, because its quality loss is not finite%s"
            more = f" ({len(forbidden) - 1} more like it)" if len(forbidden) > 1 else ""
            logger.warning(text, forbidden[0], more)
    return DivergenceTable(table, lowest_format, linears)


def planning_problem(table: DivergenceTable, target: float) -> PlanningProblem:
    """Return the planner's problem; its smallest allowed efficiency is `target`.

    The saving of an option is its share of FLOPs in the lowest precision. Its `scores` are for the
    baseline policies; so are the statistics of a linear.
    """
    linears = []
    for linear in table.statistics.linears:
        costs = {}
        for option, divergence in table.linears[linear.name].items():
            # A linear that was not measured has one value, 0 or NaN, in all its scores.
            scores = dict.fromkeys(("norms", *map(norms_score, Gemm)), divergence.abs_error)
            if _was_measured(linear):
                for gemm in Gemm:
                    bound = partial(gemm_norm_bound, gemm=gemm)
                    scores[norms_score(gemm)] = _or_nan(bound, linear, option)
                scores["norms"] = sum(scores[norms_score(gemm)] for gemm in Gemm)
            scores |= {"abs_error": divergence.abs_error, "rel_error": divergence.rel_error}
            costs[str(option)] = OptionCost(
                quality_loss=divergence.quality_loss,
                saving=option.share_in(table.lowest_format),
                scores=without_nan(scores),
            )
        statistics = without_nan(named_statistics(linear)) if _was_measured(linear) else {}
        linears.append(_choices(linear, costs, statistics))
    return PlanningProblem(linears=tuple(linears), target=target)


def unmeasured_problem(
    linears: Sequence[LinearInfo], options: Sequence[Option], lowest_format: str, target: float
) -> PlanningProblem:
    """Return the problem before the first measurement: every quality loss is 0."""
    costs = {
        str(option): OptionCost(quality_loss=0.0, saving=option.share_in(lowest_format))
        for option in options
    }
    choices = tuple(_choices(linear, costs, {}) for linear in linears)
    return PlanningProblem(linears=choices, target=target)


def _choices(
    linear: LinearInfo, costs: dict[str, OptionCost], statistics: dict[str, float | None]
) -> LinearChoices:
    return LinearChoices(
        name=linear.name,
        stage=linear.stage,
        flops=linear.flops_per_token,
        options=costs,
        statistics=statistics,
    )


def divergences_dict(table: DivergenceTable) -> dict[str, Any]:
    """Return divergences and the statistics behind them as plain types (NaN becomes null)."""
    measured = table.statistics
    linears = [
        {
            "name": linear.name,
            "stage": linear.stage,
            "flops": linear.flops_per_token,
            "options": {str(o): d for o, d in table.linears[linear.name].items()},
            "statistics": linear,
        }
        for linear in measured.linears
    ]
    head = {"version": SCHEMA_VERSION, "iteration": measured.iteration, "loss": measured.loss}
    found: dict[str, Any] = without_nan({**head, "linears": linears})
    return found


def read_statistics(path: Path) -> StatisticsTable:
    """Read the statistics behind divergences/<iteration>.json.

    Raises:
        UsageError: if the file is missing, not JSON, or has no statistics; one line.
    """
    source = f"divergences file '{path}'"
    value = read_json(path, "divergences file")
    try:
        table = {name: value[name] for name in ("version", "iteration", "loss")}
        table["linears"] = [linear["statistics"] for linear in value["linears"]]
    except (KeyError, TypeError):
        raise UsageError(f"{source} has no statistics of its linears") from None
    try:
        return StatisticsTable.from_dict(table)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def norms_of_fprop(linear: LinearStatistics, option: Option) -> float:
    """Return the bound of the loss divergence by norms, >= 0, in units of the loss."""
    return gemm_norm_bound(linear, option, Gemm.FPROP)


def norms_of_gradients(linear: LinearStatistics, option: Option) -> float:
    """Return the weight divergence by norms, >= 0: the bounds of dgrad and wgrad together."""
    dgrad = gemm_norm_bound(linear, option, Gemm.DGRAD)
    return dgrad + gemm_norm_bound(linear, option, Gemm.WGRAD)


Divergence = Callable[[LinearStatistics, Option], float]
"""Returns the divergence of an option at a linear by the linear's statistics. An option that is not
BF16 in all GEMMs may be BF16 in some, for which there are no statistics."""

LOSS_DIVERGENCES: dict[str, Divergence] = {"norms": norms_of_fprop}
"""By name, as `loss_divergence` has it; plugins add more (`megatron_snip/plugins.py`)."""

WEIGHT_DIVERGENCES: dict[str, Divergence] = {"norms": norms_of_gradients}
"""The same for `weight_divergence`."""

_OF_PRODUCTS = ("fisher", "first_plus_fisher", "updates")
"""Divergences up to 0.2, from the errors of the GEMMs' products."""


def check_divergences(config: SnipConfig) -> None:
    """Refuse names of divergences that nothing has.

    Raises:
        UsageError: one line; its `field` is the setting.
    """
    for field, added in (
        ("loss_divergence", LOSS_DIVERGENCES),
        ("weight_divergence", WEIGHT_DIVERGENCES),
    ):
        name = getattr(config, field)
        if name in added:
            continue
        text = f"unknown {field} '{name}'{did_you_mean(name, added)}"
        if name in _OF_PRODUCTS:
            text = f"{field} '{name}' needs products, which are not measured; use norms"
        raise UsageError(f"{text}; known: {', '.join(sorted(added))}", field=field)


def _named(field: str, name: str, known: Mapping[str, Divergence]) -> Divergence:
    """Return a divergence by its name; a plugin's is guarded."""
    found = known[name]
    return found if found in (norms_of_fprop, norms_of_gradients) else _guarded(field, name, found)


def _guarded(field: str, name: str, compute: Divergence) -> Divergence:
    """Return a divergence of a plugin that is NaN where it fails; rank 0 logs that once."""

    def guarded(linear: LinearStatistics, option: Option) -> float:
        if option == BF16:
            return 0.0
        try:
            return float(compute(linear, option))
        except Exception as error:  # a plugin's mistake must not end training
            if launched_rank() == 0:
                log_failure(logger, f"{field} '{name}' of a plugin", error)
            return math.nan

    return guarded


def finite_sum(values: Iterable[float]) -> float:
    """Return the sum of the values that are finite."""
    return math.fsum(filter(math.isfinite, values))


def absolute_error(linear: LinearStatistics, option: Option) -> float:
    """Return the sum of the norms of the operands' errors."""
    return sum(math.sqrt(error_square) for error_square, _ in _operand_errors(linear, option))


def relative_error(linear: LinearStatistics, option: Option) -> float:
    """Return the sum of the norms of the operands' errors, each over the operand's norm."""
    pairs = _operand_errors(linear, option)
    return sum(
        0.0 if own_square == 0 else math.sqrt(error_square / own_square)
        for error_square, own_square in pairs
    )


def _operand_errors(linear: LinearStatistics, option: Option) -> Iterator[tuple[float, float]]:
    """Yield (|Q(A) - A|^2, |A|^2) of each operand of each quantized GEMM."""
    for gemm in Gemm:
        if option[gemm] == "bf16":
            continue
        found = linear.formats[option[gemm]]
        for operand in GEMM_OPERANDS[gemm]:
            error_square, square = SQUARES[operand]
            yield getattr(found, error_square), getattr(linear, square)


def gemm_norm_bound(linear: LinearStatistics, option: Option, gemm: Gemm) -> float:
    """Return `norms_GEMM` of the module's docstring; 0 for bf16."""
    if option[gemm] == "bf16":
        return 0.0
    found = linear.formats[option[gemm]]
    norm = {}
    error = {}
    for operand, (error_square, square) in SQUARES.items():
        norm[operand] = math.sqrt(getattr(linear, square))
        error[operand] = math.sqrt(getattr(found, error_square))
    a, b = GEMM_OPERANDS[gemm]
    (c,) = set(Operand) - {a, b}  # the third tensor is no operand of this GEMM
    return norm[c] * (norm[a] * error[b] + error[a] * norm[b])


def _was_measured(linear: LinearStatistics) -> bool:
    """Return whether a backward reached the linear: none reaches frozen first layers."""
    return linear.microbatches > 0


def _highest(linear: str, options: Sequence[Option], refusals: Refusals) -> Option:
    """Return the option of the most bits that a linear can run; if it can run none, the first."""
    runnable = (option for option in options if linear not in refusals.get(option, {}))
    return max(runnable, key=lambda option: option.bits, default=options[0])


def _unmeasured_divergence(is_kept: bool) -> OptionDivergence:
    """Return what keeps a linear that was not measured at one option."""
    value = 0.0 if is_kept else math.nan
    return OptionDivergence(value, value, 0.0 if is_kept else None, value, value)


def _or_nan(
    compute: Callable[[LinearStatistics, Option], float], linear: LinearStatistics, option: Option
) -> float:
    """Return a score, or NaN where it could not be measured."""
    if not _was_measured(linear):
        return math.nan
    try:
        return compute(linear, option)
    # KeyError: a format was not measured. ValueError: the root of a negative sum, which rounding
    # or a gradient that is not finite can give. All mean that there is no score.
    except (KeyError, ValueError, OverflowError):
        return math.nan


def _share(value: float, total: float) -> float:
    """Return value / total; where the total is 0, every finite value's share is 0."""
    if not math.isfinite(value):
        return math.nan
    return value / total if total > 0 else 0.0


def _warn_about(kept: Mapping[str, Option], num_linears: int, what: str, why: str) -> None:
    """Warn once about linears that keep an option because they could not be judged."""
    if kept:
        text = "%s %d of %d linears, such as %s: they get %s (%s)"
        first = next(iter(kept))
        logger.warning(text, what, len(kept), num_linears, first, kept[first], why)
