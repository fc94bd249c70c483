"""The operands of a linear that is measured: sampled rows of X, W and G on one shard."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from megatron_snip.formats import Format, ScaleType
from megatron_snip.quantizers.quantize import operand_format
from megatron_snip.quantizers.reference import tensor_scale
from megatron_snip.types import Gemm, Operand

MEASURED_IN = {
    Operand.INPUT: Gemm.FPROP,
    Operand.WEIGHT: Gemm.FPROP,
    Operand.GRAD_OUTPUT: Gemm.DGRAD,
}
"""The GEMM in whose tiles an operand is measured."""


class AmaxesOrScales(NamedTuple):
    """What scales of entire tensors are made from: FP32 [3] each, of X, W and G in this order.

    Attributes:
        amax: the largest magnitudes over all tokens that the GEMM multiplies (an expert's are of
            all senders), and over the ranks that share the scale.
        delayed: the scales of a format with delayed scaling. Without them, those that `amax` would
            give.
    """

    amax: Tensor
    delayed: Mapping[Format, Tensor]

    def of(self, fmt: Format, operand: Operand) -> Tensor:
        """Return the `amax_or_scale` of an operand: an amax, or for delayed scaling a scale."""
        index = list(Operand).index(operand)
        if fmt.scale is not ScaleType.DELAYED:
            return self.amax[index]
        if fmt in self.delayed:
            return self.delayed[fmt][index]
        element = operand_format(fmt, operand).element
        assert element is not None
        return tensor_scale(self.amax[index], element)


class Operands(NamedTuple):
    """What is measured of a linear on this shard.

    Attributes:
        input: X [S, K] of the sampled tokens.
        weight: W [R, K], the sampled rows; None where W is not measured.
        grad_output: G [S, N] of the same tokens.
        amaxes_or_scales: what scales of entire tensors are made from; None where no format has such
            a scale.
    """

    input: Tensor
    weight: Tensor | None
    grad_output: Tensor
    amaxes_or_scales: AmaxesOrScales | None = None

    def of(self, operand: Operand) -> Tensor | None:
        """Return one of them."""
        tensors = {
            Operand.INPUT: self.input,
            Operand.WEIGHT: self.weight,
            Operand.GRAD_OUTPUT: self.grad_output,
        }
        return tensors[operand]

    def amax_or_scale(self, fmt: Format, operand: Operand) -> Tensor | None:
        """Return what a scale per tensor is made from (`AmaxesOrScales.of`), if it is known."""
        known = self.amaxes_or_scales
        return None if known is None else known.of(fmt, operand)
