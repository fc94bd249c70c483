"""Rounding FP32 numbers to the grid of a small float, by FP32 arithmetic alone.

For an element type with `m` mantissa bits and smallest normal exponent `e_min`, the grid has the
step 2^(e - m) in [2^e, 2^(e+1)), and the step 2^(e_min - m) below 2^e_min. With

    e = max(exponent of |y|, e_min),   p = 2^e,   c = 1.5 * 2^23 * 2^(e - m)

numbers near c are spaced by exactly one step, so FP32's own rounding does the work:

    nearest, ties to even   q = (y + c) - c
    stochastic              q = (y + n + c) - c,  n = (b + 1/2) * 2^-16 * 2^(e - m)

where b is a signed 16-bit random integer. n is uniform over (-1/2, 1/2) steps, so q is the upper
neighbor with probability (y - lo) / (hi - lo) to within 2^-17, over the full range. (Noise in the
low mantissa bits is biased below 2^e_min, where the step no longer shrinks.) A number on the grid
does not change, because |n| < 1/2 step.

There is no cast to a narrow type: Triton's interpreter casts wrongly, and hardware casts differ in
the sign of zero and in NaN. Every product here is with a power of two and so exact; a fused
multiply-add changes nothing.

Zeros come out as +0. The one-digit E2M0 sends ties to the larger magnitude (1.5 -> 2, 3 -> 4) but
0.5 -> 0, as IEEE 754-2019 section 4.3.1 specifies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_snip.formats import ElementType

EXPONENT_MASK = 0x7F800000
"""The exponent field of an FP32 number."""


def round_to_grid(y: Tensor, element: ElementType, bits16: Tensor | None = None) -> Tensor:
    """Round to the element type's grid; values out of range saturate.

    Args:
        y: any shape, FP32, already divided by its scale.
        element: the grid.
        bits16: y's shape, int16, uniform over all 65536 values, for stochastic rounding (unbiased
            to within 2^-17 of a step); None rounds to nearest, ties to even.

    Returns:
        FP32 of y's shape; NaN and Inf give NaN, zeros +0.
    """
    if y.dtype != torch.float32:
        raise ValueError(f"rounding works on float32, got {y.dtype}; convert first")
    finite_or_nan = (y - y).add_(y)  # Inf - Inf is NaN
    q = finite_or_nan.clamp_(-element.max_value, element.max_value).contiguous()
    round_in_place(q, element, torch.empty_like(q, dtype=torch.int32), bits16)
    return q


def round_in_place(
    y: Tensor, element: ElementType, scratch: Tensor, bits16: Tensor | None = None
) -> None:
    """Round `y` in place; the hot path behind `round_to_grid`.

    Args:
        y: FP32 within [-max_value, max_value] or NaN; overwritten.
        element: the grid.
        scratch: y's shape, int32; overwritten.
        bits16: y's shape, int16, for stochastic rounding; None rounds to nearest even.
    """
    power = scratch.view(torch.float32)  # p, once only the exponent field is left
    torch.bitwise_and(y.view(torch.int32), EXPONENT_MASK, out=scratch)
    scratch.clamp_min_((element.min_exponent + 127) << 23)  # FP32 bits of 2^e_min
    if bits16 is not None:
        noise = bits16.to(torch.float32).add_(0.5)
        y.addcmul_(noise, power, value=2.0 ** (-16 - element.mantissa_bits))
    anchor = 1.5 * 2.0 ** (23 - element.mantissa_bits)  # c / p
    y.add_(power, alpha=anchor).sub_(power, alpha=anchor)
