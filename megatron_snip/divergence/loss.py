"""Loss divergence: how sensitive the training loss is to quantizing a linear's fprop.

    fisher  = 1/2 sum_t |eY_t|^2 |G_t|^2 T / N       second order, with H ~ the Fisher information
    first   = sum_t <G_t, eY_t>                      first order, signed

Only the forward GEMM changes the current step's loss; dgrad and wgrad reach later losses through
the weights, which is the weight divergence. `fisher` orders linears; it is 15 to 700 times smaller
than the change of the loss (docs/measuring.md). The sign of `first` belongs to its batch;
`first_plus_fisher` is the paper's join (SNIP, arXiv:2602.01410, Sec. 4).
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_snip.config import LossDivergence
from megatron_snip.options import Option
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics
from megatron_snip.types import Gemm

JOINS: dict[LossDivergence, Callable[[FormatStatistics], float]] = {
    "fisher": lambda s: s.fisher,
    "first_plus_fisher": lambda s: abs(s.first) + s.fisher,
}
"""How first and second order join, in units of the loss."""


def loss_divergence(linear: LinearStatistics, option: Option, join: LossDivergence) -> float:
    """Return the loss divergence of `option` at one linear (>= 0; 0 for bf16 fprop).

    Raises:
        KeyError: if the option's fprop format was not measured.
    """
    name = option[Gemm.FPROP]
    return 0.0 if name == "bf16" else JOINS[join](linear.formats[name])
