"""Parameters that a job stores quantized, as Transformer Engine's quantized tensors.

They are recognized by what they have, without importing Transformer Engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    with _without_freed_rows(weight):
        value: Tensor = weight.dequantize()
    return value.to(weight.dtype)


@contextmanager
def _without_freed_rows(weight: Any) -> Iterator[None]:
    """Dequantize what dgrad multiplies, where Megatron-FSDP has gathered only that.

    MXFP8 has one form of a weight for fprop and another one for dgrad. In a backward Megatron-FSDP
    gathers the second one, and the memory of the first one is freed.
    """
    rows: Tensor | None = getattr(weight, "_rowwise_data", None)
    if rows is None or rows.untyped_storage().size() > 0:
        yield
        return
    weight._rowwise_data = None
    try:
        yield
    finally:
        weight._rowwise_data = rows
