"""Arithmetic that several formats share: amaxes, scales, tiles, casts.

Each operation rounds as the C++ does. A Python number divided by a tensor is, in torch, a product
with the reciprocal and rounds twice; `divided` rounds once.
"""

import torch
from torch import Tensor
from torch.nn import functional


def check(condition: bool, message: str) -> None:
    """NVTE_CHECK.

    Raises:
        RuntimeError: with the message, if the condition is not met.
    """
    if not condition:
        raise RuntimeError(message)


def divided(numerator: float, denominator: Tensor) -> Tensor:
    """Return numerator / denominator, rounded once."""
    return torch.full_like(denominator, numerator) / denominator


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude, [1] in FP32; `fmaxf` ignores NaN."""
    return x.float().abs().nan_to_num(0.0, torch.inf).amax().reshape(1)


def tile_amaxes(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of each tile; tiles at the edges may be incomplete."""
    num_rows, num_columns = x.shape
    padded = functional.pad(x, (0, -num_columns % columns, 0, -num_rows % rows))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return tiles.abs().nan_to_num(0.0, torch.inf).amax((1, 3))


def spread(values: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """Repeat a value per tile over the elements of a matrix of this shape."""
    wide = values.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def scale_from_amax(
    amax: Tensor, largest: float, epsilon: float, power_of_two: bool, when_infinite: float
) -> Tensor:
    """compute_scale_from_amax, common/recipe/recipe_common.cuh:14.

    Args:
        amax: FP32.
        largest: magnitude that amax is scaled to.
        epsilon: floor of amax.
        power_of_two: drop the scale's mantissa.
        when_infinite: scale where the quotient overflows.
    """
    amax = amax.clamp(min=epsilon)
    scale = divided(largest, amax)
    scale = torch.where(scale.isinf(), when_infinite, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def cast_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bits of FP8, rounded to nearest even and saturated (cvt.rn.satfinite)."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).view(torch.uint8)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of the codes 0 to 7; code 8 is the sign."""


def cast_fp4(x: Tensor, stochastic: bool = False) -> Tensor:
    """Return codes of E2M1, saturated, to nearest even or stochastically.

    A GPU draws its random numbers from Philox with a state per kernel; here they are torch's.
    """
    sign = torch.signbit(x).to(torch.uint8) * 8
    magnitude = x.abs().clamp(max=6.0)
    if stochastic:
        below = torch.searchsorted(E2M1, magnitude, right=True).sub(1).clamp(max=6)
        share = (magnitude - E2M1[below]) / (E2M1[below + 1] - E2M1[below])
        code = below + (torch.rand_like(magnitude) < share)
    else:
        midpoints = (E2M1[1:] + E2M1[:-1]) / 2
        upper = torch.searchsorted(midpoints, magnitude, right=True)
        lower = torch.searchsorted(midpoints, magnitude, right=False)
        code = torch.where(upper % 2 == 0, upper, lower)  # they differ at ties alone
    return code.to(torch.uint8) | sign


def fp4_values(codes: Tensor) -> Tensor:
    """Return the values of E2M1 codes."""
    return torch.cat([E2M1, -E2M1])[codes.long()]


def packed(codes: Tensor) -> Tensor:
    """Return two codes a byte, the first in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpacked(data: Tensor) -> Tensor:
    """Return one code per element; the inverse of `packed`."""
    return torch.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1)
