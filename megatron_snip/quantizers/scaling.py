"""The scale of a tile, from its largest magnitude: one fixed arithmetic for every backend.

With `amax` the largest |x| of a tile and `max` the element type's largest value, all in FP32, each
`/` one correctly rounded division:

    amax'  = max(amax, 2^-100), NaN where the tile holds NaN or Inf
    FP32   encode = max / amax'                      decode = amax' / max
    E8M0   decode = 2^ceil(log2(amax' / max))        encode = 1 / decode
    E4M3   tensor = max(tensor_amax, 2^-100) / (448 * max)
           stored = e4m3(clamp((amax / max) / tensor, 2^-6, 448))
           encode = (1 / tensor) / stored            decode = tensor * stored
    y      = clamp(x * encode, -max, max), rounded to the grid; x is about y * decode

- The floor makes every scale, its inverse and every product a normal number, so a backend that
  flushes subnormals agrees with one that does not. Smaller tiles fade to zero; a tile of zeros
  comes out as zeros.
- NaN and Inf: encode and decode become NaN, and so does every element of the tile. Under E4M3
  scales the tensor's own scale becomes NaN, and so does the entire tensor.
- E8M0 rounds the scale UP, so nothing overflows (the convention of cuBLAS, Transformer Engine and
  torchao's RCEIL). OCP MX v1.0's floor of the exponent can saturate the largest magnitudes of a
  tile. A format with FP32 scales takes power-of-two scales when its scale type is replaced by E8M0.
- E4M3 rounds to nearest, so an element can exceed `max` by 1/16 and saturates. Its stored scales
  are at least E4M3's smallest normal 2^-6, as in torchao's NVFP4. Source for the two levels:
  NVIDIA, arXiv:2509.25149.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_snip.formats import E4M3, Format, ScaleType
from megatron_snip.quantizers.rounding import EXPONENT_MASK, round_to_grid

AMAX_FLOOR = 2.0**-100
"""Smallest magnitude that a scale is made for."""

MIN_STORED_E4M3 = 2.0**-6
"""Smallest block scale under a per-tensor scale: E4M3's smallest normal number."""


def tile_scales(
    amax: Tensor, fmt: Format, tensor_amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (encode, decode): multiply by the first to quantize, by the second to dequantize.

    Args:
        amax: any shape, FP32, non-negative or NaN; the largest magnitude of each tile.
        fmt: a quantized format.
        tensor_amax: FP32 scalar, the largest magnitude of the entire tensor (over all its shards);
            used, and needed, by E4M3 scales alone.

    Returns:
        FP32 of amax's shape, both.

    Raises:
        ValueError: if `fmt` is not quantized, or E4M3 scales get no `tensor_amax`.
    """
    if fmt.element is None:
        raise ValueError(f"format '{fmt.name}' is not quantized and has no scales")
    largest = fmt.element.max_value
    if fmt.scale is ScaleType.E4M3:
        if tensor_amax is None:
            raise ValueError(f"format '{fmt.name}' needs the tensor's amax for its E4M3 scales")
        tensor = _divide(_floor(tensor_amax), E4M3.max_value * largest)
        ratio = _divide(_poison(amax), largest) / tensor
        stored = round_to_grid(ratio.clamp_(MIN_STORED_E4M3, E4M3.max_value), E4M3)
        return _divide_into(1.0, tensor) / stored, stored * tensor
    floored = _floor(amax)
    decode = _divide(floored, largest)
    if fmt.scale is ScaleType.E8M0:
        decode = _power_of_two_above(decode)
        return decode.reciprocal(), decode
    return _divide_into(largest, floored), decode


def tensor_amax_of(x: Tensor, fmt: Format, given: Tensor | None) -> Tensor | None:
    """Return the FP32 scalar that E4M3 scales need: `given`, or x's own; None for other scales."""
    if fmt.scale is not ScaleType.E4M3:
        return None
    if given is not None:
        return given.to(device=x.device, dtype=torch.float32)
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    amax: Tensor = torch.linalg.vector_norm(x, ord=math.inf, dtype=torch.float32)
    return amax


def _floor(amax: Tensor) -> Tensor:
    return _poison(amax).clamp_min_(AMAX_FLOOR)


def _poison(amax: Tensor) -> Tensor:
    """Return amax with Inf turned into NaN."""
    return amax + (amax - amax)


def _power_of_two_above(scale: Tensor) -> Tensor:
    """Return the smallest power of two >= scale, for normal scales; NaN for NaN."""
    bits = scale.view(torch.int32)
    carried = (bits + 0x007FFFFF).bitwise_and_(EXPONENT_MASK).view(torch.float32)
    return torch.where(scale.isnan(), scale, carried)


# Divisions take no Python scalars: PyTorch computes scalar / t as t.reciprocal() * scalar and, on
# CUDA, t / scalar as t * (1 / scalar), each with two roundings.
def _divide(numerator: Tensor, scalar: float) -> Tensor:
    return numerator / torch.full_like(numerator, scalar)


def _divide_into(scalar: float, denominator: Tensor) -> Tensor:
    return torch.full_like(denominator, scalar) / denominator
