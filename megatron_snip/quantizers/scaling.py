"""The scale of a tile, from its largest magnitude: ONE fixed arithmetic for every backend.

With `amax` the largest |x| of a tile and `max` the element type's largest value, all in FP32,
each `/` one correctly rounded division:

    amax'  = max(amax, 2^-100), NaN where the tile holds NaN or Inf
    FP32   encode = max / amax'                      decode = amax' / max
    E8M0   decode = 2^ceil(log2(amax' / max))        encode = 1 / decode
    E4M3   tensor = max(tensor_amax, 2^-100) / (448 * max)
           stored = e4m3(clamp((amax / max) / tensor, 2^-6, 448))
           encode = (1 / tensor) / stored            decode = tensor * stored
    y      = clamp(x * encode, -max, max), rounded to the grid; x is about y * decode

- The floor keeps every scale, its inverse and every product a normal number, so that a backend
  that flushes subnormals agrees with one that does not. Smaller tiles fade to zero; a tile of
  zeros comes out as zeros.
- NaN and Inf: encode and decode become NaN, and so does every element of the tile. Under E4M3
  scales the tensor's own scale becomes NaN, and so does the whole tensor.
- E8M0 rounds the scale UP, so that nothing overflows (cuBLAS's and Transformer Engine's
  convention, torchao's RCEIL); OCP MX v1.0's floor of the exponent can push the largest
  magnitudes of a tile into saturation. A format with FP32 scales takes power-of-two scales when
  its scale type is replaced by E8M0.
- E4M3 rounds to nearest, so an element can exceed `max` by 1/16 and saturates. Its stored scales
  stay at or above E4M3's least normal 2^-6, as in torchao's NVFP4; sources for the two levels:
  NVIDIA, arXiv:2509.25149.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_snip.formats import E4M3, ElementType, Format, ScaleType
from megatron_snip.quantizers.rounding import EXPONENT_MASK, round_to_nearest_even

AMAX_FLOOR = 2.0**-100
"""Least magnitude that a scale is made for."""

LEAST_STORED_E4M3 = 2.0**-6
"""Least block scale under a per-tensor scale: E4M3's least normal number."""


@dataclass(frozen=True)
class TileScales:
    """Scales of all tiles, in amax's shape, FP32.

    Attributes:
        encode: multiply to quantize.
        decode: multiply to dequantize.
    """

    encode: Tensor
    decode: Tensor


def tile_scales(amax: Tensor, fmt: Format, tensor_amax: Tensor | None = None) -> TileScales:
    """Return the scales that tiles of largest magnitude `amax` take in `fmt`.

    Args:
        amax: any shape, FP32, non-negative or NaN.
        fmt: a quantized format.
        tensor_amax: FP32 scalar, the whole tensor's largest magnitude (over all its shards);
            used, and needed, by E4M3 scales alone.

    Raises:
        ValueError: if `fmt` is not quantized, or E4M3 scales get no `tensor_amax`.
    """
    if fmt.element is None:
        raise ValueError(f"format '{fmt.name}' is not quantized and has no scales")
    largest = fmt.element.max_value
    if fmt.scale is ScaleType.E4M3:
        if tensor_amax is None:
            raise ValueError(f"format '{fmt.name}' needs the tensor's amax for its E4M3 scales")
        return _two_level(amax, fmt.element, tensor_amax)
    floored = _floor(amax)
    if fmt.scale is ScaleType.E8M0:
        decode = _power_of_two_above(_divide(floored, largest))
        return TileScales(encode=decode.reciprocal(), decode=decode)
    return TileScales(encode=_divide_into(largest, floored), decode=_divide(floored, largest))


def tensor_scale(tensor_amax: Tensor, element: ElementType) -> Tensor:
    """The per-tensor scale above E4M3 block scales: it maps tensor_amax to 448 * max."""
    return _divide(_floor(tensor_amax), E4M3.max_value * element.max_value)


def stored_scales(decode: Tensor, fmt: Format, tensor_amax: Tensor | None = None) -> Tensor:
    """What a tile's scale is stored as: the E8M0 or FP32 number, or the E4M3 one under `tensor`.

    Args:
        decode: FP32, as `tile_scales` returned it.
        fmt: a quantized format.
        tensor_amax: as given to `tile_scales`.

    Returns:
        FP32 of decode's shape, exactly representable in the scale's type.
    """
    if fmt.scale is not ScaleType.E4M3:
        return decode
    assert tensor_amax is not None and fmt.element is not None
    # decode = tensor * stored to within half an ulp; rounding to E4M3 recovers `stored` exactly
    ratio = decode / tensor_scale(tensor_amax, fmt.element)
    return round_to_nearest_even(ratio, E4M3)


def _two_level(amax: Tensor, element: ElementType, tensor_amax: Tensor) -> TileScales:
    tensor = tensor_scale(tensor_amax, element)
    ratio = _divide(_poison(amax), element.max_value) / tensor
    stored = round_to_nearest_even(ratio.clamp_(LEAST_STORED_E4M3, E4M3.max_value), E4M3)
    encode = _divide_into(1.0, tensor) / stored
    return TileScales(encode=encode, decode=stored * tensor)


def _floor(amax: Tensor) -> Tensor:
    """Amax, at least AMAX_FLOOR, with Inf turned into NaN."""
    return _poison(amax).clamp_min_(AMAX_FLOOR)


def _poison(amax: Tensor) -> Tensor:
    """Amax with Inf turned into NaN."""
    return amax + (amax - amax)


def _power_of_two_above(scale: Tensor) -> Tensor:
    """The least power of two >= scale, for normal scales; NaN for NaN."""
    bits = scale.view(torch.int32)
    carried = (bits + 0x007FFFFF).bitwise_and_(EXPONENT_MASK).view(torch.float32)
    return torch.where(scale.isnan(), scale, carried)


# Python scalars are kept out of divisions: PyTorch computes scalar / t as t.reciprocal() * scalar
# and, on CUDA, t / scalar as t * (1 / scalar), each with two roundings.
def _divide(numerator: Tensor, scalar: float) -> Tensor:
    return numerator / torch.full_like(numerator, scalar)


def _divide_into(scalar: float, denominator: Tensor) -> Tensor:
    return torch.full_like(denominator, scalar) / denominator
