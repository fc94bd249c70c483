"""The weights of `norms-kinds`: what a bound by norms costs in fprop, in dgrad and in wgrad.

Least squares of the gaps of `forks` on three sums, one for each kind of GEMM: the bounds of the
low GEMMs of a run (`norms_GEMM` of megatron_snip/divergence/quality_loss.py). Only ratios matter to
a plan. The weights are those of FITTED; the other formats test them, with one free scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.compare import analysis
from benchmarks.compare.forks import Fit
from megatron_snip.planning.policies import KIND_WEIGHTS
from megatron_snip.types import Gemm

FITTED = "fp3"
"""The format whose runs the weights come from."""

EQUAL = dict.fromkeys(Gemm, 1.0)
"""The weights of plain `norms`."""


@dataclass(frozen=True)
class KindFit:
    """What a unit of bound costs by kind of GEMM.

    Attributes:
        cost: {kind: 1e-3 nat for a unit of the bound}.
        error: their standard errors.
    """

    cost: Mapping[Gemm, float]
    error: Mapping[Gemm, float]

    @property
    def weights(self) -> dict[Gemm, float]:
        """The costs relative to that of fprop."""
        return {gemm: cost / self.cost[Gemm.FPROP] for gemm, cost in self.cost.items()}


def fit_kinds(fitted: Fit) -> KindFit:
    """Return the costs by kind from the runs of one format."""
    sums = np.stack([_sums(fitted, {gemm: 1.0}) for gemm in Gemm], axis=1)
    found = analysis.regress(sums, fitted.gap, fitted.data)
    errors = np.sqrt(np.diag(found.covariance))
    return KindFit(
        dict(zip(Gemm, found.cost.tolist(), strict=True)),
        dict(zip(Gemm, errors.tolist(), strict=True)),
    )


def explained(fitted: Fit, total: np.ndarray) -> float:
    """Return the share of variance of held-out pairs that a sum explains, up to one scale.

    Args:
        fitted: the runs.
        total: [runs], the sum of a score over the low GEMMs of each run.
    """
    return analysis.regress(total[:, None], fitted.gap, fitted.data).additivity


def _sums(fitted: Fit, weights: Mapping[Gemm, float]) -> np.ndarray:
    """Return the weighted sum of the bounds of each run's low GEMMs, [runs]."""
    weight = np.array([weights.get(gemm, 0.0) for _, gemm in fitted.items])
    found: np.ndarray = fitted.design @ (weight * np.array(fitted.scores["norms"]))
    return found


def kinds_table(fits: Mapping[str, Fit]) -> str:
    """Return the fit of each format, and how much of its variance each set of weights explains."""
    lines = []
    for low, fitted in fits.items():
        found = fit_kinds(fitted)
        costs = [f"{found.cost[g]:.3f} ± {found.error[g]:.3f}" for g in Gemm]
        ratios = ", ".join(f"{found.weights[g]:.3f}" for g in Gemm)
        totals = [_sums(fitted, weights) for weights in (found.weights, KIND_WEIGHTS, EQUAL)]
        totals.append(fitted.design @ np.array(fitted.scores["snip"]))
        shares = [f"{explained(fitted, total):.2f}" for total in totals]
        lines.append((low, *costs, ratios, *shares, f"{fitted.costs.additivity:.2f}"))
    head = (
        "format",
        *(f"{gemm} ± standard error" for gemm in Gemm),
        "relative to fprop",
        "explained with these",
        "with KIND_WEIGHTS",
        "with equal weights",
        "with SNIP's quality loss",
        "with a cost of each GEMM",
    )
    weights = ", ".join(f"{gemm} {weight:g}" for gemm, weight in KIND_WEIGHTS.items())
    return f"KIND_WEIGHTS: {weights} (from {FITTED})\n\n{analysis.markdown(head, lines)}"
