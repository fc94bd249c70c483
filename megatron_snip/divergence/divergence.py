"""How much a linear's options hurt, as scores from its statistics; all are 0 for bf16.

    loss_l(q)      = fisher of fprop's format                     sensitivity of the loss
    weight_l(q)^2  = kappa aligned_fisher(fprop) + 1/8 loc^2(dgrad) + loc^2(wgrad)

Only fprop changes the loss of the iteration. `fisher` orders linears; it is 15 to 700 times smaller
than the change of the loss (docs/measuring.md). `first_plus_fisher` is the paper's |first| + fisher
(SNIP, arXiv:2602.01410, Sec. 4); the sign of `first` belongs to its batch.

The weight divergence scores the change of the next optimizer updates. The change of the linear's
own update through wgrad is loc^2 = |D * eW|^2 / |update|^2. The change of all updates through fprop
grows with `aligned_fisher`; kappa makes its sum over linears 4 sqrt(n) times that of loc^2, both in
the lowest precision, with n microbatches in the iteration. wgrad's errors are nearly independent
from microbatch to microbatch; fprop's partly repeat, since the weight's rounding does. The change
of the updates below through dgrad is small and about equal at all linears; an eighth of loc^2
stands for it. The factors come from brute force on one model (5 layers of width 192), and
docs/measuring.md judges them on others.

The measures of the baselines are sums over the GEMMs, and of min-abs-err and min-rel-err over their
operands. C is the tensor of X, W and G that is not an operand (the paper's bound):

    abs_error = sum |Q(A) - A|         rel_error = sum |Q(A) - A| / |A|
    norms     = sum |C| (|A| |Q(B) - B| + |Q(A) - A| |B|)

Every function raises KeyError if one of the option's formats was not measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from megatron_snip.config import LossDivergence
from megatron_snip.options import Option
from megatron_snip.statistics.records import LinearStatistics
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand

FPROP_RATIO = 4.0
"""Sum of the fprop terms over linears, in units of the sum of loc^2, for one microbatch."""
DGRAD_SHARE = 0.125
"""Of loc^2, for dgrad."""

_ERROR_FIELDS = {
    Operand.INPUT: ("input_error_square", "input_square"),
    Operand.WEIGHT: ("weight_error_square", "weight_square"),
    Operand.GRAD_OUTPUT: ("grad_error_square", "grad_square"),
}


def loss_divergence(linear: LinearStatistics, option: Option, estimator: LossDivergence) -> float:
    """Return the loss divergence of an option at one linear, >= 0, in units of the loss."""
    name = option[Gemm.FPROP]
    if name == "bf16":
        return 0.0
    found = linear.formats[name]
    return found.fisher + (abs(found.first) if estimator == "first_plus_fisher" else 0.0)


def fprop_scale(linears: Sequence[LinearStatistics], lowest_format: str) -> float:
    """Return kappa; 0 where `aligned_fisher` is 0 everywhere."""
    rows = [linear.formats[lowest_format] for linear in linears if lowest_format in linear.formats]
    aligned = finite_sum(row.aligned_fisher for row in rows)
    local = finite_sum(row.local_square for row in rows)
    count = statistics.median([x.microbatches for x in linears if x.microbatches] or [0.0])
    return FPROP_RATIO * math.sqrt(count) * local / aligned if aligned > 0 else 0.0


def finite_sum(values: Iterable[float]) -> float:
    """Return the sum of the values that are finite."""
    return math.fsum(filter(math.isfinite, values))


def weight_divergence(linear: LinearStatistics, option: Option, kappa: float) -> float:
    """Return the weight divergence of an option at one linear, >= 0, without unit."""
    total = 0.0
    if option.fprop != "bf16":
        total += kappa * linear.formats[option.fprop].aligned_fisher
    if option.dgrad != "bf16":
        total += DGRAD_SHARE * linear.formats[option.dgrad].local_square
    if option.wgrad != "bf16":
        total += linear.formats[option.wgrad].local_square
    return math.sqrt(total)


def absolute_error(linear: LinearStatistics, option: Option) -> float:
    """Return the sum of the norms of the operands' errors."""
    return sum(math.sqrt(error) for error, _ in _operand_errors(linear, option))


def relative_error(linear: LinearStatistics, option: Option) -> float:
    """Return the sum of the norms of the operands' errors, each over the operand's norm."""
    pairs = _operand_errors(linear, option)
    return sum(math.sqrt(error / norm) if norm > 0 else 0.0 for error, norm in pairs)


def _operand_errors(linear: LinearStatistics, option: Option) -> Iterator[tuple[float, float]]:
    """Yield (|Q(A) - A|^2, |A|^2) of each operand of each quantized GEMM."""
    for gemm in Gemm:
        if option[gemm] != "bf16":
            found = linear.formats[option[gemm]]
            for operand in GEMM_OPERANDS[gemm]:
                error, norm = _ERROR_FIELDS[operand]
                yield getattr(found, error), getattr(linear, norm)


def norm_bound(linear: LinearStatistics, option: Option) -> float:
    """Return the sum over GEMMs of the bound of their errors by Frobenius norms."""
    total = 0.0
    for gemm in (g for g in Gemm if option[g] != "bf16"):
        found, (a, b) = linear.formats[option[gemm]], GEMM_OPERANDS[gemm]
        norm = {o: math.sqrt(getattr(linear, name)) for o, (_, name) in _ERROR_FIELDS.items()}
        error = {o: math.sqrt(getattr(found, name)) for o, (name, _) in _ERROR_FIELDS.items()}
        (other,) = set(Operand) - {a, b}
        total += norm[other] * (norm[a] * error[b] + error[a] * norm[b])
    return total
