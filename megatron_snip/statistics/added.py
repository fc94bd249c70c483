"""Statistics that plugins add to the measurement of each linear.

An entry of `STATISTICS` is a sum or a maximum over the elements of one operand, before and after
quantization. So it combines over microbatches, over ranks that hold shards (tensor and sequence
parallelism), and over ranks that hold other tokens or experts. `FormatStatistics.added` has the
results by name.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_snip.log import warn_once_per_job
from megatron_snip.statistics.records import FORMAT_COLUMNS, Column, Over
from megatron_snip.types import Operand

logger = logging.getLogger(__name__)

_OVER: dict[Operand, Over] = {
    Operand.INPUT: "tokens",
    Operand.WEIGHT: "weight",
    Operand.GRAD_OUTPUT: "tokens",
}
"""What the measured elements of an operand are a sample of."""


@dataclass(frozen=True)
class Statistic:
    """A number that is measured of each linear in each format.

    Attributes:
        operand: Which tensor it is of: X as fprop quantizes it, W as fprop does, or G as dgrad
            does.
        measure: Given the operand and its values in the format, both FP32 of the same shape, it
            returns a tensor of one element. X is [tokens, in_features], W [out_features,
            in_features] and G [tokens, out_features], of the sampled tokens and of this rank's
            shard. It must not change them.
        combine: `sum` if `measure` adds up a function of single elements. It is scaled from the
            sampled tokens to all of the batch; of W it is the mean over microbatches and experts.
            `max` if it is the largest of such values; that of the sampled tokens.
        grad_power: The power of G with which the value grows: 2 for a sum of squares of G. The
            linears see G times a factor, such as the loss scale; the table has dL/dY.
    """

    operand: Operand
    measure: Callable[[Tensor, Tensor], Tensor]
    combine: Literal["sum", "max"] = "sum"
    grad_power: int = 0

    @property
    def column(self) -> Column:
        """How its values are scaled; a maximum only by the power of G."""
        over: Over = "all" if self.combine == "max" else _OVER[self.operand]
        return Column(over, self.grad_power)


STATISTICS: dict[str, Statistic] = {}
"""Statistics that plugins add, by name (`megatron_snip/plugins.py`)."""


def added_statistics() -> dict[str, Statistic]:
    """Return the entries of `STATISTICS`, in the same order on all ranks.

    (Ranks may have imported the plugins in another order.) An entry with the name of a statistic of
    SNIP's is left out, with a warning.
    """
    found = {}
    for name, each in sorted(STATISTICS.items()):
        if name in FORMAT_COLUMNS:
            text = f"statistic '{name}' of a plugin is left out: SNIP has one of that name"
            warn_once_per_job(logger, text)
        else:
            found[name] = each
    return found
