"""Loss divergence: how much the training loss changes when a linear's fprop is quantized.

    first    = sum_t <G_t, eY_t>                         first order, signed
    fisher   = 1/2 sum_t |eY_t|^2 |G_t|^2 T / N          second order, H ~ Fisher
    aligned_fisher = 1/2 sum_t <G_t, eY_t>^2 T           the same along the error's own direction

Only the forward GEMM changes the current step's loss; dgrad and wgrad reach later losses through
the weights, which is the weight divergence. Over several microbatches the signed first-order
terms of a fixed error change sign from batch to batch, so three ways to join the two parts are
kept (SNIP, arXiv:2602.01410, Sec. 4, joins |first| and the second-order term).
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_snip.config import LossJoin
from megatron_snip.options import Option
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics
from megatron_snip.types import Gemm

JOINS: dict[LossJoin, Callable[[FormatStatistics], float]] = {
    "fisher": lambda s: s.fisher,
    "first_plus_fisher": lambda s: abs(s.first) + s.fisher,
    "mean_first_plus_fisher": lambda s: s.first_abs + s.fisher,
    "aligned_fisher": lambda s: s.aligned_fisher,
}
"""How first and second order join; every way returns a loss change, in units of the loss."""


def loss_divergence(linear: LinearStatistics, option: Option, join: LossJoin) -> float:
    """Return the predicted loss change of `option` at one linear (>= 0; 0 for bf16 fprop).

    Raises:
        KeyError: if the option's fprop format was not measured.
    """
    name = option[Gemm.FPROP]
    return 0.0 if name == "bf16" else JOINS[join](linear.formats[name])
