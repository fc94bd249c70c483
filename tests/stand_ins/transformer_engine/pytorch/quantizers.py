"""Quantizers: one rounding for rows, one for columns; weights can be cached and refreshed."""

from __future__ import annotations

import torch

MANTISSA_BITS = {"blockwise": 3, "mxfp8": 4, "nvfp4": 1, "tensorwise": 2, "tensorwise_hybrid": 2}


def rounded(tensor: torch.Tensor, recipe: str) -> torch.Tensor:
    """Round to a few mantissa bits, FP32."""
    if recipe not in MANTISSA_BITS:
        return tensor.float()
    mantissa, exponent = torch.frexp(tensor.float())
    grid = 2.0 ** (MANTISSA_BITS[recipe] + 1)
    return torch.ldexp(torch.round(mantissa * grid) / grid, exponent)


class Quantized:
    """A tensor as rows and as columns, and the quantizer that made it."""

    def __init__(self, quantizer: Quantizer, tensor: torch.Tensor) -> None:
        self.quantizer = quantizer
        self.quantize_(tensor)

    def quantize_(self, tensor: torch.Tensor) -> None:
        """Refresh in place, by the quantizer that made it."""
        self.rows = rounded(tensor, self.quantizer.row_recipe)
        self.columns = rounded(tensor, self.quantizer.column_recipe)


class Quantizer:
    label = ""

    def __init__(self, label: str = "") -> None:
        self.row_recipe = self.column_recipe = label or self.label

    def quantize(self, tensor: torch.Tensor) -> Quantized:
        return Quantized(self, tensor)


class IdentityQuantizer(Quantizer):
    label = "bf16"


class Float8BlockQuantizer(Quantizer):
    label = "blockwise"


class MXFP8Quantizer(Quantizer):
    label = "mxfp8"


class NVFP4Quantizer(Quantizer):
    label = "nvfp4"


class HybridQuantizer(Quantizer):
    def __init__(self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer) -> None:
        if not all(isinstance(q, Quantizer) for q in (rowwise_quantizer, columnwise_quantizer)):
            raise TypeError("HybridQuantizer composes two quantizers")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError("HybridQuantizer composes two distinct quantizers")
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.row_recipe = rowwise_quantizer.row_recipe
        self.column_recipe = columnwise_quantizer.column_recipe


BY_NAME = {cls.label: cls for cls in Quantizer.__subclasses__() if cls.label}
