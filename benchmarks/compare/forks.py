"""What each GEMM costs: a regression on runs with random halves of the GEMMs low.

The rows are made at the tag `variants.TAG`: a score that they judge is that of measured products.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.compare import analysis
from benchmarks.compare.variants import Item
from megatron_snip.types import Gemm

TARGET = 0.75
"""Of the plans that scores are judged by."""


def _halves(items: list[Item], pair: int) -> tuple[set[Item], set[Item]]:
    order = np.random.default_rng(pair).permutation(len(items))
    first = {items[i] for i in order[: len(items) // 2]}
    return first, set(items) - first


def _scores_path(results: Path, setup: str, scenario: str, low: str) -> Path:
    return results.with_name(f"{results.stem}-scores-{setup}-{scenario}-{low}.json")


@dataclass(frozen=True)
class Fit:
    """What the GEMMs cost by the runs of one setup, scenario and format.

    Attributes:
        items: the GEMMs.
        flops: [items].
        scores: {name: [items]}, from one measurement of the checkpoint.
        costs: of the items.
        design: [runs, items], 1 for an item that is low in a run; complements adjoin.
        gap: [runs], 1e-3 nat.
        data: [runs], the data seed.
    """

    items: list[Item]
    flops: np.ndarray
    scores: dict[str, list[float]]
    costs: analysis.Costs
    design: np.ndarray
    gap: np.ndarray
    data: np.ndarray


def fit(rows: list[dict[str, Any]], results: Path) -> Fit | None:
    """Return the costs by a regression; None if there are too few runs.

    Args:
        rows: of one setup, scenario and format.
        results: file of the rows; the scores lie beside it.
    """
    path = _scores_path(results, *(rows[0][k] for k in ("setup", "scenario", "low")))
    known = json.loads(path.read_text())
    items: list[Item] = []
    for item in known["items"]:
        name, gemm = item.rsplit(":", 1)
        items.append((name, Gemm[gemm.upper()]))
    found = analysis.gaps(rows)
    pairs = [(variant, pair) for variant, values in found.items() for pair in values]
    pairs.sort(key=lambda run: (run[1][1], *map(int, run[0].split("-"))))  # complements adjoin
    if len(pairs) < 2 * len(items):  # a pair of complements gives one equation
        return None
    design = np.zeros((len(pairs), len(items)))
    for row, (variant, _) in enumerate(pairs):
        k, half = map(int, variant.split("-"))
        low_half = _halves(items, k)[half]
        design[row] = [item in low_half for item in items]
    gap = np.array([found[variant][pair] for variant, pair in pairs])
    data = np.array([pair[1] for _, pair in pairs])
    costs = analysis.regress(design, gap, data)
    return Fit(items, np.array(known["flops"]), known["scores"], costs, design, gap, data)


def fork_table(fitted: Fit) -> str:
    """Return the costs of GEMMs by kind, the rank correlation of scores, and plan regrets."""
    costs, flops = fitted.costs, fitted.flops
    gemms = np.array([gemm for _, gemm in fitted.items])
    kinds = []
    for gemm in Gemm:
        of_kind = gemms == gemm
        error = float(np.sqrt(of_kind @ costs.covariance @ of_kind))
        total = f"{costs.cost[of_kind].sum():+.1f} ± {error:.1f}"
        kinds.append((gemm.name.lower(), total, f"{costs.cost[of_kind].max():+.2f}"))
    best = costs.cost[analysis.best_items(costs.cost, flops, TARGET)].sum()
    fprop = gemms == Gemm.FPROP
    snip = analysis.best_items(np.array(fitted.scores["snip"]), flops, TARGET)
    lines = []
    for score, values in fitted.scores.items():
        low_set = analysis.best_items(np.array(values), flops, TARGET)
        rho = spearmanr(values, costs.cost).statistic
        among = spearmanr(np.array(values)[fprop], costs.cost[fprop]).statistic
        change = low_set.astype(float) - snip
        error = float(np.sqrt(change @ costs.covariance @ change))
        over = f"{change @ costs.cost:+.1f} ± {error:.1f}" if error else ""
        regret = f"{costs.cost[low_set].sum() - best:+.1f}"
        lines.append((score, f"{rho:.2f}", f"{among:.2f}", regret, over))
    alike = np.array([costs.cost[gemms == gemm].mean() for gemm in gemms])
    regret = analysis.best_plan_regret(costs, np.where(fprop, costs.cost, alike), flops, TARGET)
    return "\n\n".join(
        (
            f"{len(fitted.gap)} runs. Standard error of a GEMM's cost "
            f"{np.sqrt(np.diag(costs.covariance)).mean():.2f}; residual {costs.residual:.2f}; "
            f"held-out share of variance explained {costs.additivity:.2f}.",
            analysis.markdown(
                ("GEMM", "cost of all ± standard error", "largest cost of one"), kinds
            ),
            analysis.markdown(
                (
                    "score",
                    "Spearman with the cost",
                    "within fprop",
                    "regret of its plan",
                    "over snip",
                ),
                lines,
            ),
            "If all dgrad cost the same and all wgrad too, the best plan would have a regret of "
            f"{regret[0]:.1f} ± {regret[1]:.1f} (standard deviation) in costs with these errors.",
        )
    )
