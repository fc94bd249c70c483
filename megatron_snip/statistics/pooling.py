"""Taking the chance out of estimates with what linears of the same kind have in common.

scale^2 = E_r (sum_t <dG_t, Y_t> / eps)^2 of one linear (coupling.py) is known from one sample a
probe, a chi-square of one degree of freedom: it scatters by 1.4 of itself. Its sum over channels
apart, channel^2, scatters little. How the two relate is a matter of where the output goes, so it is
alike for the same linear of all layers, and its mean over them is well known:

    rho     = mean over linears of a kind of scale^2 / channel^2
    pooled  = (probes scale^2 + PRIOR rho channel^2) / (probes + PRIOR)

the mean of what was seen and of what the kind says, which counts as PRIOR more samples: a linear
unlike its kind, as the first layer's often are, shows with more probes (benchmarks/fidelity.py
shows the evidence; 1 to infinity do about as well). A ratio counts at most CAP times its kind's
median: where channel^2 is what noise left of it, the ratio says nothing.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

PRIOR = 3.0
CAP = 16.0
"""A chi-square of one degree of freedom exceeds 16 medians once in 150 draws."""

ESTIMATE = 8.0
"""Of fwd^2, what channels give apart and through the scale counts as this many samples of the
whole. Tried from 1 to 32 on the checkpoints of benchmarks/fidelity.py: agreement hardly turns on it
between 4 and 16, fewer samples let chance in, more keep many probes from leading to the truth."""


def joined_square(whole: float, variance: float, estimate: float, num_probes: int) -> float:
    """Return fwd^2 from samples of it and from an estimate without chance.

    With more probes the samples take over, and what other ways channels go together shows. One
    probe's sample, the square of a Gaussian, has the variance 2 fwd^4; what the sample of tokens
    adds to it makes it count for as much less.

    Args:
        whole: fwd^2 as sampled, >= 0.
        variance: of one probe's, from the sample of tokens alone.
        estimate: of fwd^2, from channels apart and the output's scale.
        num_probes: samples that `whole` is the mean of.
    """
    samples = float(num_probes)
    if variance > 0:
        samples *= 2.0 * estimate**2 / (2.0 * estimate**2 + variance)
    return (samples * whole + ESTIMATE * estimate) / (samples + ESTIMATE)


def kind_of(name: str) -> str:
    """Return what the same linear of all layers shares: the name without the layer's number."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def pooled_squares(
    names: Sequence[str],
    squares: Sequence[float],
    channel_squares: Sequence[float],
    num_probes: int = 1,
) -> list[float]:
    """Return the pooled scale^2 of each linear, >= 0; a NaN stays with its linear.

    Args:
        names: of the linears.
        squares: scale^2 as sampled.
        channel_squares: its sum over channels apart; 0 where the probe changed nothing.
        num_probes: samples that scale^2 is the mean of.
    """
    unbounded = [math.inf] * len(names)
    return _pooled(names, squares, channel_squares, unbounded, _capped_mean, num_probes)


def pooled_across(
    names: Sequence[str],
    across: Sequence[float],
    squares: Sequence[float],
    microbatches: Sequence[float],
) -> list[float]:
    """Return what microbatches have in common, pooled likewise.

    How much of it there is for each |s_m|^2 is a matter of the format and of the GEMM, and a sketch
    (sketch.py) knows it to 0.18 of the whole only: too little to rank linears of about one size.
    It lies between -1 and M - 1 for M microbatches; one beyond 2 M, where |s_m|^2 is what noise
    left of it, counts as that.

    Args:
        names: of the linears.
        across: sum_{m != m'} <s_m, s_m'> as sketched, of either sign.
        squares: sum_m |s_m|^2; 0 where nothing was seen.
        microbatches: M of each linear; of all its experts together.
    """
    bounds = [2.0 * count for count in microbatches]
    return _pooled(names, across, squares, bounds, lambda ratios: sum(ratios) / len(ratios))


def _pooled(
    names: Sequence[str],
    values: Sequence[float],
    sizes: Sequence[float],
    bounds: Sequence[float],
    mean: Callable[[Sequence[float]], float],
    samples: int = 1,
) -> list[float]:
    ratios: dict[str, list[float]] = defaultdict(list)
    for name, value, size, bound in zip(names, values, sizes, bounds, strict=True):
        if size != 0 and math.isfinite(value / size):
            ratios[kind_of(name)].append(min(max(value / size, -bound), bound))
    means = {kind: mean(known) for kind, known in ratios.items()}
    pooled = []
    for name, value, size in zip(names, values, sizes, strict=True):
        of_kind = PRIOR * means.get(kind_of(name), 0.0) * size
        pooled.append((samples * value + of_kind) / (samples + PRIOR) if size != 0 else value)
    return pooled


def _capped_mean(ratios: Sequence[float]) -> float:
    cap = CAP * statistics.median(ratios)
    return sum(min(ratio, cap) for ratio in ratios) / len(ratios)
