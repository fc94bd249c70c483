"""Weight divergence: how much the next AdamW update of all weights changes.

    dW_l = sqrt(fwd^2 + bwd^2 + loc^2)

fwd: through eY_l (every weight's gradient, second order); bwd: through eX_l (weights below l);
loc: through eW_l (the linear's own weight). fprop's format decides fwd, dgrad's bwd, wgrad's loc,
so an option may mix them. Relative to |update_k| of each weight k (design: a probe in place of
SNIP's two noise injections, arXiv:2602.01410, Sec. 4).
"""

from __future__ import annotations

import math

from megatron_snip.options import Option
from megatron_snip.statistics.records import LinearStatistics
from megatron_snip.types import Gemm


def weight_divergence(linear: LinearStatistics, option: Option) -> float:
    """Return dW of `option` at one linear (>= 0; 0 for bf16).

    Raises:
        KeyError: if one of the option's formats was not measured.
    """
    total = 0.0
    if option[Gemm.FPROP] != "bf16":
        total += linear.formats[option[Gemm.FPROP]].forward_square
    if option[Gemm.DGRAD] != "bf16":
        total += linear.formats[option[Gemm.DGRAD]].backward_square
    if option[Gemm.WGRAD] != "bf16":
        total += linear.formats[option[Gemm.WGRAD]].local_square
    return math.sqrt(total)
