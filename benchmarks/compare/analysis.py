"""Paired gaps with intervals, and the cost of each GEMM, from the rows of a comparison.

A gap is a branch's held-out loss minus that of the BF16 branch of the same checkpoint and data, in
1e-3 nat. Intervals are Student's t over pairs, 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

Row = Mapping[str, Any]
MILLI = 1000.0


def gaps(rows: Iterable[Row], key: str = "loss") -> dict[str, dict[tuple[int, int], float]]:
    """Return {variant: {(seed, data seed): gap}}.

    Args:
        rows: of one setup, scenario and format.
        key: which loss: `loss` in the plan's precision, `loss_bf16`, or `training_loss`.
    """
    by_pair: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        by_pair.setdefault((row["seed"], row["data_seed"]), {})[row["variant"]] = row[key]
    found: dict[str, dict[tuple[int, int], float]] = {}
    for pair, losses in by_pair.items():
        for variant, loss in losses.items():
            if "bf16" in losses and variant != "bf16":
                found.setdefault(variant, {})[pair] = MILLI * (loss - losses["bf16"])
    return found


@dataclass(frozen=True)
class Mean:
    """A mean, and half of its 95 % interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        interval = "" if math.isnan(self.half) else f" ± {self.half:.1f}"
        return f"{self.mean:+.1f}{interval}"


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean with its interval; the interval of a single value is NaN."""
    count = len(values)
    if count < 2:
        return Mean(float(np.mean(values)), float("nan"))
    half = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / count**0.5
    return Mean(float(np.mean(values)), float(half))


def paired(a: Mapping[tuple[int, int], float], b: Mapping[tuple[int, int], float]) -> list[float]:
    """Return a - b for the pairs that both have."""
    return [a[pair] - b[pair] for pair in a if pair in b]


def p_text(differences: Sequence[float]) -> str:
    """Return the two-sided p of a paired t-test as text; "-" for fewer than two pairs."""
    p = float(stats.ttest_1samp(differences, 0.0).pvalue) if len(differences) > 1 else np.nan
    return "-" if np.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


@dataclass(frozen=True)
class Costs:
    """What each item costs in the low format, from a regression of gaps on items.

    Attributes:
        cost: [items], 1e-3 nat.
        covariance: [items, items], of the errors of `cost`.
        residual: standard deviation of what the items do not explain, on its degrees of freedom.
        additivity: share of the variance of held-out pairs that the sum of costs explains.
    """

    cost: np.ndarray
    covariance: np.ndarray
    residual: float
    additivity: float


def regress(low: np.ndarray, gap: np.ndarray, data: np.ndarray) -> Costs:
    """Return the items' costs by least squares.

    Args:
        low: [runs, items], 1 where an item is in the low format.
        gap: [runs].
        data: [runs], data seed of each run; each has an intercept of its own.
    """
    intercepts = (data[:, None] == np.unique(data)[None, :]).astype(float)
    design = np.hstack([low, intercepts])
    found = np.linalg.lstsq(design, gap, rcond=None)[0]
    residuals = gap - design @ found
    freedom = max(1, len(gap) - np.linalg.matrix_rank(design))
    sigma = float(np.sqrt(residuals @ residuals / freedom))
    num = low.shape[1]
    covariance = sigma**2 * np.linalg.pinv(design.T @ design)[:num, :num]
    return Costs(found[:num], covariance, sigma, _explained(design, gap))


def best_plan_regret(
    costs: Costs, truth: np.ndarray, flops: np.ndarray, target: float, draws: int = 300
) -> tuple[float, float]:
    """Return the mean and standard deviation of the best plan's regret in estimated costs.

    Args:
        costs: whose errors are drawn anew, from the same seed each time.
        truth: [items], the costs that the best plan knows.
        flops: [items].
        target: share of FLOPs in the low format.
        draws: of the errors.
    """
    values, vectors = np.linalg.eigh(costs.covariance)
    spread = vectors * np.sqrt(np.clip(values, 0.0, None))
    rng, best = np.random.default_rng(0), best_items(truth, flops, target)
    regrets = []
    for _ in range(draws):
        noisy = truth + spread @ rng.standard_normal(len(truth))
        regrets.append(noisy[best].sum() - noisy[best_items(noisy, flops, target)].sum())
    return float(np.mean(regrets)), float(np.std(regrets))


def _explained(design: np.ndarray, gap: np.ndarray, folds: int = 8) -> float:
    """R^2 on runs that the fit did not see, in folds of complementary pairs."""
    group = (np.arange(len(gap)) // 2) % folds
    predicted = np.empty_like(gap)
    for fold in range(folds):
        out = group == fold
        fit = np.linalg.lstsq(design[~out], gap[~out], rcond=None)[0]
        predicted[out] = design[out] @ fit
    return float(1 - np.sum((gap - predicted) ** 2) / np.sum((gap - gap.mean()) ** 2))


def best_items(cost: np.ndarray, flops: np.ndarray, target: float) -> np.ndarray:
    """Return which items are low in the cheapest plan by these costs: least cost per FLOP first."""
    order = np.argsort(cost / flops)
    before = np.concatenate([[0.0], np.cumsum(flops[order])[:-1]]) / flops.sum()
    low = np.zeros(len(cost), dtype=bool)
    low[order[before < target - 1e-9]] = True
    return low


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
