"""What predicts a linear's divergence, and how a prediction is compared with the truth.

SNIP's own scores stand beside what others go by: local quantization errors, bounds by Frobenius
norms, one of the terms alone. Comparisons are rank correlations (a planner ranks), Pearson's of
logarithms, and the median of predicted over measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import pearsonr, spearmanr

from megatron_snip.divergence.local_error import absolute_error, relative_error
from megatron_snip.options import Option
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics, StatisticsTable

Score = Callable[[LinearStatistics, FormatStatistics], float]

LOSS_SCORES: dict[str, Score] = {
    "first + fisher": lambda _, f: f.first + f.fisher,
    "first + aligned fisher": lambda _, f: f.first + f.aligned_fisher,
    "|first| + fisher": lambda _, f: abs(f.first) + f.fisher,
    "fisher only": lambda _, f: f.fisher,
    "first order only": lambda _, f: f.first,
    "aligned fisher only": lambda _, f: f.aligned_fisher,
}
"""What predicts a loss change (signed where the score is)."""

WEIGHT_SCORES: dict[str, Score] = {
    "fwd^2 + bwd^2 + loc^2": lambda _, f: math.sqrt(
        f.forward_square + f.backward_square + f.local_square
    ),
    "loc only": lambda _, f: math.sqrt(f.local_square),
}
"""What predicts the change of the next update."""

LOSS, WEIGHT = "first + fisher", "fwd^2 + bwd^2 + loc^2"
"""The predictions that SNIP's statistics stand for."""


def local_scores(format_name: str) -> dict[str, Score]:
    """What others go by: local quantization errors and norm bounds."""
    option = Option.uniform(format_name)
    return {
        "min-abs-err": lambda s, _: absolute_error(s, option),
        "min-rel-err": lambda s, _: relative_error(s, option),
        "norm bound": _norm_bound,
    }


def _norm_bound(s: LinearStatistics, f: FormatStatistics) -> float:
    """|G| (|X| |Q(W)-W| + |Q(X)-X| |W|): bounds |<G, eY>| by Frobenius norms alone."""
    weight = math.sqrt(s.weight_square / max(s.microbatches, 1))
    weight_error = math.sqrt(f.weight_error_square / max(s.microbatches, 1))
    error = math.sqrt(s.input_square) * weight_error + math.sqrt(f.input_error_square) * weight
    return math.sqrt(s.grad_square) * error


@dataclass(frozen=True)
class Agreement:
    """How one prediction agrees with the truth over all linears.

    Attributes:
        spearman: rank correlation.
        pearson_log: Pearson correlation of logarithms of magnitudes.
        median_ratio: median of prediction over truth.
    """

    spearman: float
    pearson_log: float
    median_ratio: float


def agreement(predicted: np.ndarray, truth: np.ndarray) -> Agreement:
    """Compare two vectors; entries where either is 0 count for the ranks only."""
    both = (predicted != 0) & (truth != 0)
    logs = np.log(np.abs(predicted[both])), np.log(np.abs(truth[both]))
    enough = both.sum() > 2
    return Agreement(
        float(spearmanr(predicted, truth)[0]),
        float(pearsonr(*logs)[0]) if enough else math.nan,
        float(np.median(predicted[both] / truth[both])) if enough else math.nan,
    )


def mean_agreement(
    tables: Sequence[StatisticsTable], name: str, score: Score, truth: np.ndarray
) -> dict[str, float]:
    """Return the fields of `Agreement`, means over refreshes that drew differently."""
    found = [asdict(agreement(scores_of(table, name, score), truth)) for table in tables]
    return {key: float(np.mean([each[key] for each in found])) for key in found[0]}


def ceiling(truth: np.ndarray, noise: float, draws: int = 200) -> float:
    """Return the rank correlation of a truth with itself under noise once more.

    No prediction can be expected to agree better with a truth that was measured under such noise.
    """
    rng = np.random.default_rng(0)
    again = [truth + noise * rng.standard_normal(len(truth)) for _ in range(draws)]
    return float(np.mean([spearmanr(truth, other)[0] for other in again]))


def scores_of(table: StatisticsTable, name: str, score: Score) -> np.ndarray:
    """Return a score of every linear in a format, in the model's order."""
    return np.array([score(s, s.formats[name]) for s in table.linears])
