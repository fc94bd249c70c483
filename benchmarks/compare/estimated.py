"""The curve from the costs of GEMMs: what each plan should cost at any share.

A plan's cost is the sum of the costs of its low GEMMs, by the regression of `forks`. All plans are
made from the scores of one checkpoint and judged by runs from the same checkpoint. Errors are those
of the regression; that costs add up is an assumption, whose share of variance `forks` prints.

Every branch of `forks` has half of the GEMMs low. So a constant can move from the intercepts to all
costs without a change of the fit (`analysis.regress` takes the solution of least norm): differences
of plans with equally many low GEMMs are identified, the level of a plan is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.compare import analysis
from benchmarks.compare.curve import RIVALS, TARGETS, VARIANTS, share_at
from benchmarks.compare.forks import Fit
from benchmarks.compare.variants import Formats, Planner, low_items
from megatron_snip.config import SnipConfig
from megatron_snip.options import Granularity, Option, enumerate_options
from megatron_snip.planning.problem import (
    LinearChoices,
    OptionCost,
    PlanningProblem,
    norms_score,
)
from megatron_snip.types import Gemm

PER_GEMM, PER_LINEAR = ("norms-gemm", "norms-q-gemm"), ("norms", "norms-q-linear")
ESTIMATED = tuple(dict.fromkeys((*VARIANTS, *PER_GEMM, *PER_LINEAR)))
"""The variants of the table: those of the curve, and plans from norms alone."""

COMPARED = {
    "snip-gemm": (*RIVALS["snip-gemm"], *PER_GEMM),
    "snip-linear": tuple(dict.fromkeys((*RIVALS["snip-linear"], *PER_LINEAR))),
    "norms-gemm": ("norms-q-gemm",),
    "norms": ("norms-q-linear",),
}
"""Whom each variant is compared with."""

RANDOM_ORDERS = 20
"""Seeds of `random`, whose mean is one curve."""

DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """Which GEMMs each variant has in the low format, and what they cost.

    Attributes:
        fit: the costs.
        low: {variant: {share: [items]}}, 1 for a low item; between 0 and 1 for `random`.
    """

    fit: Fit
    low: Mapping[str, Mapping[float, np.ndarray]]

    def cost(self, variant: str, share: float) -> float:
        """Return a plan's cost in 1e-3 nat."""
        return float(self.low[variant][share] @ self.fit.costs.cost)

    def error(self, change: np.ndarray) -> float:
        """Return the standard error of a difference of plans' costs."""
        return float(np.sqrt(change @ self.fit.costs.covariance @ change))


def estimate(fit: Fit, low: str, targets: Sequence[float] = TARGETS) -> Estimate:
    """Plan for every variant and target from a checkpoint's scores.

    Args:
        fit: costs and scores.
        low: the low format.
        targets: made attainable by `Planner.equal_share`.
    """
    found: dict[str, dict[float, np.ndarray]] = {}
    for variant in ESTIMATED:
        seeds = range(RANDOM_ORDERS if variant == "random" else 1)
        planners = [_planner(fit, low, seed) for seed in seeds]
        curve = found[variant] = {}
        for target in targets:
            parts = [_indicator(fit, planner, variant, target, low) for planner in planners]
            curve[planners[0].equal_share(target)] = np.mean(parts, axis=0)
    return Estimate(fit, found)


def _indicator(fit: Fit, planner: Planner, variant: str, target: float, low: str) -> np.ndarray:
    lowered = low_items(planner.plan(variant, target), Formats(low))
    return np.array([float(item in lowered) for item in fit.items])


def _planner(fit: Fit, low: str, seed: int) -> Planner:
    """Return a planner whose quality losses are sums over GEMMs of the scores of `forks`."""
    formats = Formats(low)
    snip, norms = np.array(fit.scores["snip"]), norms_losses(fit)
    granularities: tuple[Granularity, ...] = ("linear", "gemm")
    problems = {}
    for granularity in granularities:
        problems[f"norms-q-{granularity}"] = _problem(fit, formats, granularity, norms)
        problems[f"snip-{granularity}"] = _problem(fit, formats, granularity, snip)
        problems[granularity] = problems[f"snip-{granularity}"]
    return Planner(problems, formats, seed)


def norms_losses(fit: Fit) -> np.ndarray:
    """Return the quality loss of each item alone, [items].

    The scores have the error of G in the tiles of wgrad; a run measures it in those of dgrad.
    """
    bounds = np.array(fit.scores["norms"])
    is_fprop = np.array([gemm == Gemm.FPROP for _, gemm in fit.items])
    of_fprop = bounds / bounds[is_fprop].sum()
    of_gradients = SnipConfig().weight_lambda * bounds / bounds[~is_fprop].sum()
    return np.where(is_fprop, of_fprop, of_gradients)


def _problem(
    fit: Fit, formats: Formats, granularity: Granularity, quality_loss: np.ndarray
) -> PlanningProblem:
    norms = fit.scores["norms"]
    index = {item: k for k, item in enumerate(fit.items)}
    options = enumerate_options((formats.high, formats.low), granularity)

    def cost(name: str, option: Option) -> OptionCost:
        lowered = {gemm: index[name, gemm] for _, gemm in low_items({name: option}, formats)}
        scores = {norms_score(gemm): norms[k] for gemm, k in lowered.items()}
        return OptionCost(
            quality_loss=sum(float(quality_loss[k]) for k in lowered.values()),
            saving=option.share_in(formats.low),
            scores={"norms": sum(scores.values()), **scores},
        )

    flops: dict[str, float] = {}
    for (name, _), gemm_flops in zip(fit.items, fit.flops, strict=True):
        flops[name] = flops.get(name, 0.0) + float(gemm_flops)
    linears = [
        LinearChoices(
            name=name, stage=0, flops=total, options={str(o): cost(name, o) for o in options}
        )
        for name, total in flops.items()
    ]
    return PlanningProblem(linears=tuple(linears), target=0.0)


def estimate_table(found: Estimate) -> str:
    """Return the cost of every variant at every share, and the differences of COMPARED."""
    shares = sorted(next(iter(found.low.values())))
    head = ("cost", *(f"{100 * share:.1f} %" for share in shares))
    lines = [(variant, *(f"{found.cost(variant, s):.1f}" for s in shares)) for variant in found.low]
    texts = [analysis.markdown(head, lines)]
    lines = []
    more = []
    for reference, rules in COMPARED.items():
        for rule in rules:
            changes = [found.low[rule][s] - found.low[reference][s] for s in shares]
            cells = [
                f"{change @ found.fit.costs.cost:+.1f} ± {found.error(change):.1f}"
                for change in changes
            ]
            lines.append((f"{rule} - {reference}", *cells))
            cells = [_more(found, reference, rule, s) for s in shares]
            more.append((f"{reference} over {rule}", *cells))
    texts.append(analysis.markdown(("difference ± standard error", *head[1:]), lines))
    texts.append(analysis.markdown(("more low FLOPs at equal cost", *head[1:]), more))
    return "\n\n".join(texts)


def _more(found: Estimate, reference: str, rule: str, share: float) -> str:
    """How many percent more low FLOPs `reference` has at the rule's cost, with a 95 % interval.

    The interval comes from costs that are drawn anew with the errors of the regression.
    """
    if not 0.7 < share < 1.0:
        return ""
    curve = found.low[reference]
    shares = sorted(curve)
    costs = found.fit.costs
    design = np.array([curve[s] for s in shares])

    def more(cost: np.ndarray) -> float:
        wanted = float(found.low[rule][share] @ cost)
        return 100 * (share_at(shares, list(design @ cost), wanted) / share - 1)

    drawn = np.random.default_rng(0).multivariate_normal(
        costs.cost, costs.covariance, size=DRAWS, method="eigh"
    )
    low, high = np.percentile([more(cost) for cost in drawn], (2.5, 97.5))
    return f"{more(costs.cost):+.1f} % [{low:+.1f}, {high:+.1f}]"
