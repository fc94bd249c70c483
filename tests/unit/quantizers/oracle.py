"""An independent quantizer: a plain loop over tiles in NumPy, element types from ml_dtypes."""

import ml_dtypes
import numpy as np
import torch

from megatron_snip.formats import E2M1, E4M3, ElementType, Format, ScaleType

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}


def grid(element: ElementType) -> np.ndarray:
    """Every non-negative value of the element type, ascending, from the type's own definition."""
    if element.name == "e2m0":
        return np.array([0, 1, 2, 4], np.float32)
    dtype, bits = DTYPES[element.name], {"e4m3": 8, "e2m1": 4}[element.name]
    codes = np.arange(2 ** (bits - 1), dtype=np.uint8).view(dtype).astype(np.float32)
    return np.unique(codes[np.isfinite(codes)])


def round_nearest(y: np.ndarray, element: ElementType) -> np.ndarray:
    """Saturate, then cast to the ml_dtypes type (round to nearest even)."""
    clipped = np.clip(y, -element.max_value, element.max_value)
    if element in (E4M3, E2M1):
        out = clipped.astype(DTYPES[element.name]).astype(np.float32)
    else:
        values = grid(element)
        distance = np.abs(np.abs(clipped)[..., None] - values)
        tie_up = len(values) - 1 - distance[..., ::-1].argmin(-1)  # larger magnitude on a tie
        tie_up = np.where(np.abs(clipped) == 0.5, 0, tie_up)
        out = np.copysign(values[tie_up], clipped)
    return np.where(np.isfinite(y), out, np.float32("nan"))


def scales(tile: np.ndarray, fmt: Format, tensor_amax: np.float32) -> tuple[np.float32, np.float32]:
    """(encode, decode) of one tile, in float32 with one rounding an operation."""
    one, largest = np.float32(1), np.float32(fmt.element.max_value)
    amax = np.float32(np.abs(tile).max())
    floor = np.float32(2.0**-100)
    if fmt.scale is ScaleType.E4M3:
        tensor = max(tensor_amax, floor) / (np.float32(448) * largest)
        block = np.clip(amax / largest / tensor, np.float32(2**-6), np.float32(448))
        block = block.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return one / tensor / block, tensor * block
    amax = max(amax, floor)
    if fmt.scale is ScaleType.E8M0:
        mantissa, exponent = np.frexp(amax / largest)
        decode = np.float32(np.ldexp(1.0, exponent - (mantissa == 0.5)))
        return one / decode, decode
    return largest / amax, amax / largest


def quantize(
    x: np.ndarray, fmt: Format, block: tuple[int, int], tensor_amax: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (values, decode scales, dequantized) of a [rows, cols] float32 matrix."""
    rows, cols = x.shape
    grid_shape = (-(-rows // block[0]), -(-cols // block[1]))
    values, decodes = np.zeros_like(x), np.zeros(grid_shape, np.float32)
    dequantized = np.zeros_like(x)
    if tensor_amax is None:
        tensor_amax = np.float32(np.abs(x).max()) if x.size else np.float32(0)
    for i in range(grid_shape[0]):
        for j in range(grid_shape[1]):
            span = np.s_[
                i * block[0] : (i + 1) * block[0],
                j * block[1] : (j + 1) * block[1],
            ]
            if not np.isfinite(x[span]).all() or (
                fmt.scale is ScaleType.E4M3 and not np.isfinite(tensor_amax)
            ):
                values[span] = dequantized[span] = decodes[i, j] = np.nan
                continue
            encode, decodes[i, j] = scales(x[span], fmt, tensor_amax)
            values[span] = round_nearest(x[span] * encode, fmt.element)
            dequantized[span] = values[span] * decodes[i, j]
    return values, decodes, dequantized


def same(actual: torch.Tensor, wanted: np.ndarray) -> bool:
    """Equal everywhere, NaN to NaN; the sign of zero does not count."""
    return np.array_equal(actual.float().numpy(), wanted.astype(np.float32), equal_nan=True)
