"""Rounding FP32 numbers to the grid of a small float, by FP32 arithmetic alone.

For an element type with `m` mantissa bits and least normal exponent `e_min`, the grid has the
step 2^(e - m) in [2^e, 2^(e+1)) and keeps the step 2^(e_min - m) below 2^e_min. With

    e = max(exponent of |y|, e_min),   p = 2^e,   c = 1.5 * 2^23 * 2^(e - m)

FP32's own rounding does the work: numbers near c are spaced by exactly one step, so

    nearest, ties to even   q = (y + c) - c
    stochastic              q = (y + n + c) - c,  n = (b + 1/2) * 2^-16 * 2^(e - m)

where b is a signed 16-bit random integer: n is uniform over (-1/2, 1/2) steps, so q is the upper
neighbour with probability (y - lo) / (hi - lo) to within 2^-17, over the whole range. (Noise in
the low mantissa bits is biased below 2^e_min, where the step no longer shrinks.) A number on the
grid stays put, since |n| < 1/2 step.

No cast to a narrow type is made: Triton's interpreter casts wrongly, hardware casts differ in the
sign of zero and in NaN, and this must be one arithmetic on every backend. Every product here is
with a power of two and so exact, hence a fused multiply-add changes nothing.

Zeros come out as +0. The one-digit E2M0 sends ties to the larger magnitude (1.5 -> 2, 3 -> 4) but
0.5 -> 0, as IEEE 754-2019 section 4.3.1 has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.formats import ElementType

EXPONENT_MASK = 0x7F800000
"""The exponent field of an FP32 number."""


def least_power_bits(element: ElementType) -> int:
    """FP32 bit pattern of 2^min_exponent, below which the step stays constant."""
    return (element.min_exponent + 127) << 23


def anchor_factor(element: ElementType) -> float:
    """The anchor over the power, c / p = 1.5 * 2^(23 - m), exact in FP32."""
    return 1.5 * 2.0 ** (23 - element.mantissa_bits)


def noise_factor(element: ElementType) -> float:
    """The noise over its draw, n / ((b + 1/2) * p) = 2^(-16 - m), exact in FP32."""
    return 2.0 ** (-16 - element.mantissa_bits)


def round_to_nearest_even(y: Tensor, element: ElementType) -> Tensor:
    """Round to the nearest number of the grid, ties to even, saturating.

    Args:
        y: any shape, FP32, already divided by its scale.
        element: the grid.

    Returns:
        FP32 of y's shape, on the grid; NaN and Inf give NaN, zeros +0.
    """
    q = _saturate(y, element)
    round_in_place(q, element, torch.empty_like(q, dtype=torch.int32))
    return q


def round_stochastic(y: Tensor, element: ElementType, bits16: Tensor) -> Tensor:
    """Round to one of the two neighbours on the grid, unbiased to within 2^-17 of a step.

    Args:
        y: any shape, FP32, already divided by its scale; saturates first.
        element: the grid.
        bits16: y's shape, int16, uniform over all 65536 values.

    Returns:
        FP32 of y's shape, on the grid; NaN and Inf give NaN, zeros +0.
    """
    q = _saturate(y, element)
    round_in_place(q, element, torch.empty_like(q, dtype=torch.int32), bits16)
    return q


def round_in_place(
    y: Tensor, element: ElementType, scratch: Tensor, bits16: Tensor | None = None
) -> None:
    """Round `y` where it stands; the hot path behind both functions above.

    Args:
        y: FP32 within [-max_value, max_value] or NaN; overwritten.
        element: the grid.
        scratch: y's shape, int32; overwritten.
        bits16: y's shape, int16, for stochastic rounding; None rounds to nearest even.
    """
    power = scratch.view(torch.float32)  # p, once the exponent field stands alone
    torch.bitwise_and(y.view(torch.int32), EXPONENT_MASK, out=scratch)
    scratch.clamp_min_(least_power_bits(element))
    if bits16 is not None:
        noise = bits16.to(torch.float32).add_(0.5)
        y.addcmul_(noise, power, value=noise_factor(element))
    factor = anchor_factor(element)
    y.add_(power, alpha=factor).sub_(power, alpha=factor)


def _saturate(y: Tensor, element: ElementType) -> Tensor:
    if y.dtype != torch.float32:
        raise ValueError(f"rounding works on float32, got {y.dtype}; convert first")
    finite_or_nan = (y - y).add_(y)  # Inf - Inf is NaN
    return finite_or_nan.clamp_(-element.max_value, element.max_value).contiguous()
