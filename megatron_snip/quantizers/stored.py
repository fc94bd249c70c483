"""Parameters that a job stores quantized, as Transformer Engine's quantized tensors.

They are recognized by what they have, without importing Transformer Engine.
"""

import torch
from torch import Tensor


def is_quantized(weight: Tensor) -> bool:
    """Return whether a parameter is one of Transformer Engine's quantized tensors."""
    return hasattr(weight, "_quantizer")


@torch.no_grad()
def high_precision(weight: Tensor) -> Tensor:
    """Return a weight, without gradients, as GEMMs in high precision multiply it.

    A quantized one is dequantized into a new tensor of its nominal dtype.
    """
    if not is_quantized(weight):
        return weight.detach()
    value: Tensor = weight.dequantize()
    return value.to(weight.dtype)
