"""An independent quantizer: a plain loop over tiles in NumPy, element types from ml_dtypes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import torch

from megatron_snip.formats import E2M1, E4M3, E5M2, FORMATS, ElementType, Format, ScaleType

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}

SCALED = [
    *(f for f in FORMATS.values() if f.quantized and f.scale is not ScaleType.DELAYED),
    replace(FORMATS["fp8"], name="fp8-e8m0", scale=ScaleType.E8M0),
    replace(FORMATS["fp4"], name="fp4-e8m0", scale=ScaleType.E8M0),
    replace(FORMATS["fp4"], name="fp4-hadamard", wgrad_hadamard=16),
    replace(FORMATS["nvfp4"], name="nvfp4-hadamard", wgrad_hadamard=16),
    *(
        replace(FORMATS[name], name=f"{name}-e5m2", element=E5M2)
        for name in ("fp8_blockwise", "fp8_tensorwise", "mxfp8")
    ),
]
"""Every format whose scales are made of the tensor, and the variants that a record can select."""


def grid(element: ElementType) -> np.ndarray:
    """Every non-negative value of the element type, ascending, from the type's own definition."""
    if element.name == "e2m0":
        return np.array([0, 1, 2, 4], np.float32)
    dtype, bits = DTYPES[element.name], {"e4m3": 8, "e5m2": 8, "e2m1": 4}[element.name]
    codes = np.arange(2 ** (bits - 1), dtype=np.uint8).view(dtype).astype(np.float32)
    return np.unique(codes[np.isfinite(codes)])


def round_nearest(y: np.ndarray, element: ElementType) -> np.ndarray:
    """Saturate, then cast to the ml_dtypes type (round to nearest even)."""
    clipped = np.clip(y, -element.max_value, element.max_value)
    if element in (E4M3, E5M2, E2M1):
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
    floor = np.float32(2.0**-94 if fmt.element is E5M2 else 2.0**-100)
    if fmt.scale is ScaleType.E4M3:
        tensor = max(tensor_amax, floor) / (np.float32(448) * largest)
        block = np.clip(amax / largest / tensor, np.float32(2**-6), np.float32(448))
        block = block.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return one / tensor / block, tensor * block
    if fmt.scale is ScaleType.E4M3_TE:
        top = max(tensor_amax, floor)
        tensor = np.float32(448) * largest / top
        block = min(amax * (tensor * (one / largest)), np.float32(448))
        block = block.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        if block == 0:
            return np.float32(0), np.float32(0)
        factor = np.float32(2**12 / (448 * float(largest)))
        return one / (block * (one / tensor)), block * (top / np.float32(2**12)) * factor
    if fmt.scale is ScaleType.TENSOR:
        encode = largest / max(tensor_amax, floor)
        return encode, one / encode
    amax = max(amax, floor)
    if fmt.scale is ScaleType.E8M0:
        mantissa, exponent = np.frexp(amax / largest)
        decode = np.float32(np.ldexp(1.0, exponent - (mantissa == 0.5)))
        return one / decode, decode
    return largest / amax, amax / largest


def quantize_dequantize(x: np.ndarray, fmt: Format, block: tuple[int, int]) -> np.ndarray:
    """What is left of a [rows, cols] float32 matrix."""
    out = np.zeros_like(x)
    tensor_amax = np.float32(np.abs(x).max()) if x.size else np.float32(0)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            span = np.s_[i : i + block[0], j : j + block[1]]
            finite = np.isfinite(x[span]).all()
            of_tensor = fmt.needs_amax_or_scale
            if not finite or (of_tensor and not np.isfinite(tensor_amax)):
                out[span] = np.nan
                continue
            encode, decode = scales(x[span], fmt, tensor_amax)
            out[span] = round_nearest(x[span] * encode, fmt.element) * decode
    return out


def same(actual: torch.Tensor, wanted: np.ndarray) -> bool:
    """Equal everywhere, NaN to NaN; the sign of zero does not count."""
    return np.array_equal(actual.float().numpy(), wanted.astype(np.float32), equal_nan=True)
