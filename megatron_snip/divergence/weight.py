"""Weight divergence: how much the next optimizer updates change, as a score that orders options.

    dW_l^2 = kappa aligned_l(fprop) + 1/8 loc_l^2(dgrad) + loc_l^2(wgrad)

loc^2 = |D * eW|^2 / |update|^2 is the change of the linear's own update through wgrad, as it is.
What fprop's error does to all updates goes with `aligned_fisher`; kappa makes its sum over linears
four times that of loc^2, both in the lowest precision. What dgrad's error does to the updates of
the layers below is small and about equally large everywhere; an eighth of loc^2 stands for it.
Both factors are from brute force on one model (5 layers of width 192); docs/measuring.md judges
them on others, and against fuller estimators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_snip.options import Option
from megatron_snip.statistics.records import LinearStatistics
from megatron_snip.types import Gemm

FPROP_RATIO = 4.0
"""Sum of the fprop terms over linears, in units of the sum of loc^2."""
DGRAD_SHARE = 0.125
"""Of loc^2, for dgrad."""


def fprop_scale(linears: Sequence[LinearStatistics], lowest_format: str) -> float:
    """Return kappa; 0 where `aligned_fisher` is 0 everywhere."""
    rows = [linear.formats[lowest_format] for linear in linears if lowest_format in linear.formats]
    aligned = math.fsum(row.aligned_fisher for row in rows if math.isfinite(row.aligned_fisher))
    local = math.fsum(row.local_square for row in rows if math.isfinite(row.local_square))
    return FPROP_RATIO * local / aligned if aligned > 0 else 0.0


def weight_divergence(linear: LinearStatistics, option: Option, kappa: float) -> float:
    """Return dW of `option` at one linear (>= 0; 0 for bf16).

    Args:
        linear: its statistics.
        option: the formats of its GEMMs.
        kappa: see `fprop_scale`.

    Raises:
        KeyError: if one of the option's formats was not measured.
    """
    total = 0.0
    if option[Gemm.FPROP] != "bf16":
        total += kappa * linear.formats[option[Gemm.FPROP]].aligned_fisher
    if option[Gemm.DGRAD] != "bf16":
        total += DGRAD_SHARE * linear.formats[option[Gemm.DGRAD]].local_square
    if option[Gemm.WGRAD] != "bf16":
        total += linear.formats[option[Gemm.WGRAD]].local_square
    return math.sqrt(total)
