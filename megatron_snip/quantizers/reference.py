"""Reference quantize-dequantize: the specification that every kernel matches bit for bit.

    x [rows, cols]  ->  q * decode scale,  q on the element type's grid, one scale per tile

A tile is a (rows, cols) block of the matrix, so one function serves 1 x 128 tiles along a row,
128 x 1 tiles along tokens and 128 x 128 blocks of weights, without transposes; the last tile of a
dimension may be short.

The matrix is processed in pieces of complete tiles that fit into a cache. The order of work and
the shape of pieces change no bit.

SCALES. With `amax` the largest |x| of a tile, `tensor_amax` that of the tensor and `max` the
element type's largest value, all in FP32, each `/` one correctly rounded division:

    amax'  = max(amax, 2^-100), NaN where the tile holds NaN or Inf; E5M2 has 2^-94 for 2^-100
    FP32   encode = max / amax'                      decode = amax' / max
    E8M0   decode = 2^ceil(log2(amax' / max))        encode = 1 / decode
    E4M3   tensor = max(tensor_amax, 2^-100) / (448 * max)
           stored = e4m3(clamp((amax / max) / tensor, 2^-6, 448))
           encode = (1 / tensor) / stored            decode = tensor * stored
    E4M3_TE  tensor = 448 * max / max(tensor_amax, 2^-100)
           stored = e4m3(min(amax * (tensor * (1 / max)), 448))
           encode = 1 / (stored * (1 / tensor)), 0 where stored is 0
           decode = stored * max(tensor_amax, 2^-100) * (1 / (448 * max))
    TENSOR encode = max / max(tensor_amax, 2^-100)   decode = 1 / encode
    DELAYED  encode = the given scale                decode = 1 / encode
    y      = clamp(x * encode, -max, max), rounded to the grid; x is about y * decode

- The floor makes every scale, its inverse and every product a normal number, so a backend that
  flushes subnormals agrees with one that does not. Smaller tiles fade to zero; a tile of zeros
  comes out as zeros.
- NaN and Inf: encode and decode become NaN, and so does every element of the tile. Under E4M3 and
  TENSOR scales the tensor's own scale becomes NaN, and so does the entire tensor. (Transformer
  Engine takes the scale 1 for a tensor with Inf.)
- E8M0 rounds the scale UP, so nothing overflows (the convention of cuBLAS, Transformer Engine and
  torchao's RCEIL). OCP MX v1.0's floor of the exponent can saturate the largest magnitudes of a
  tile. A format with FP32 scales takes power-of-two scales when its scale type is replaced by E8M0.
- E4M3 rounds to nearest, so an element can exceed `max` by 1/16 and saturates. Its stored scales
  are at least E4M3's smallest normal 2^-6, as in torchao's NVFP4. Source for the two levels:
  NVIDIA, arXiv:2509.25149.
- E4M3_TE is NVFP4 as Transformer Engine's kernels compute it (2.20).
- TENSOR and DELAYED are Transformer Engine's current and delayed scaling (2.20): it stores the
  inverse of the scale that it multiplied by. A delayed scale knows only earlier tensors, so larger
  numbers saturate.

ROUNDING uses FP32 arithmetic alone. For an element type with `m` mantissa bits and smallest normal
exponent `e_min`, the grid has the step 2^(e - m) in [2^e, 2^(e+1)), and the step 2^(e_min - m)
below 2^e_min. With

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

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_snip.formats import E4M3, Block, ElementType, Format, ScaleType

PIECE_ELEMENTS = 1 << 18
"""Elements of a piece, the fastest of 2^14 .. 2^20 measured: larger ones get fresh memory from the
system each time, smaller ones pay for starting some ten operations per piece."""

_SHORT_TILE = 32

_EXPONENT_MASK = 0x7F800000


@torch.no_grad()
def quantize_dequantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    *,
    bits16: Tensor | None = None,
    amax_or_scale: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return x quantized and dequantized; `check` validates the arguments.

    Args:
        x: [rows, cols], BF16 or FP32, any strides, may be empty.
        fmt: a quantized format; its `tile` and `weight_block` are not read.
        block: (rows, cols) of a tile.
        bits16: x's shape, int16, uniform over all 65536 values: round stochastically with these
            numbers (`StochasticStream.bits16`); None rounds to nearest even.
        amax_or_scale: FP32 scalar, needed where `fmt.needs_amax_or_scale`. It is the largest
            magnitude of the tensor, over all ranks that share the scale. For delayed scaling it is
            the scale itself.
        scales: what `tile_scales` returns for `tile_amaxes` of x, if the caller has it.
        dtype: dtype of the result: FP32 (exact up to one rounding of q * scale) or BF16 (rounded a
            second time, to nearest even).

    Returns:
        [rows, cols], contiguous.
    """
    element = fmt.element
    assert element is not None
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    # The CPU patch inspects every torch call in Python, to redirect CUDA calls. There is nothing
    # to redirect here. Nor does autograd see what is done: operations start faster so.
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        size = min(x.numel(), max(PIECE_ELEMENTS, block[0] * block[1]))
        floats = torch.empty(size, dtype=torch.float32, device=x.device)
        ints = torch.empty(size, dtype=torch.int32, device=x.device)
        for rows, cols, tile in _pieces((x.shape[0], x.shape[1]), block):
            source = tiles(x[rows, cols], tile)
            result = tiles(out[rows, cols], tile)
            count = source.numel()
            y = floats[:count].view(source.shape)
            scratch = ints[:count].view(source.shape)
            bits = None if bits16 is None else tiles(bits16[rows, cols], tile)
            if source.dtype != torch.float32:
                source = y.copy_(source)
            if scales is None:
                magnitude = torch.abs(source, out=scratch.view(torch.float32))
                encode, decode = tile_scales(_tile_amax(magnitude), fmt, amax_or_scale)
            else:
                at = _tile_indices(rows, block[0]), slice(None), _tile_indices(cols, block[1])
                encode, decode = (scale[at] for scale in scales)
            multiply_tiles(source, encode, out=y)
            # A scale of the tile alone makes its largest magnitude `max` up to two roundings of
            # FP32. Rounding to the grid takes these out, with every draw: no clamp is needed.
            if fmt.needs_amax_or_scale:
                y.clamp_(-element.max_value, element.max_value)
            round_in_place(y, element, scratch, bits)
            multiply_tiles(y, decode, out=result)
    return out


def check(x: Tensor, fmt: Format, block: Block) -> None:
    """Refuse what cannot be quantized.

    Raises:
        ValueError: on a dtype, shape, block or format that does not fit.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"quantization takes float32 or bfloat16, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"quantization takes a matrix, got shape {tuple(x.shape)}; flatten first")
    if fmt.element is None:
        raise ValueError(f"format '{fmt.name}' is not quantized")
    if min(block) < 1:
        raise ValueError(f"a tile has at least one row and column, got {block}")


def tiles(part: Tensor, tile: Block) -> Tensor:
    """View a matrix of complete tiles as [R, tile rows, C, tile cols]."""
    rows, cols = tile
    return part.view(part.shape[0] // rows, rows, part.shape[1] // cols, cols)


def multiply_tiles(matrix: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write each element of a matrix [R, r, C, c] times the scale [R, 1, C, 1] of its tile."""
    _, tall, _, wide = matrix.shape
    if tall > 1 and wide > 1:
        # Rows in one run each: PyTorch multiplies a run at a time, and takes as long to start it.
        scales = scales.expand(-1, -1, -1, wide).flatten(2)
        matrix = matrix.flatten(2)
        out = out.view(matrix.shape)
    torch.mul(matrix, scales, out=out)


def _pieces(shape: tuple[int, int], tile: Block) -> Iterator[tuple[slice, slice, Block]]:
    """Yield (rows, cols, tile) of pieces that cover a [rows, cols] matrix once.

    A piece has complete tiles of one shape, of PIECE_ELEMENTS together or one tile at most.
    """
    for rows, tall in _regions(shape[0], tile[0]):
        for cols, wide in _regions(shape[1], tile[1]):
            width = min(len(cols), max(1, PIECE_ELEMENTS // (tall * wide)) * wide)
            height = min(len(rows), max(1, PIECE_ELEMENTS // (tall * width)) * tall)
            for top in range(rows.start, rows.stop, height):
                part = slice(top, min(top + height, rows.stop))
                for left in range(cols.start, cols.stop, width):
                    yield part, slice(left, min(left + width, cols.stop)), (tall, wide)


def _regions(size: int, tile: int) -> list[tuple[range, int]]:
    """Return (indices, tile size) of the complete tiles and of the short last one."""
    complete = size - size % tile
    spans = [(range(complete), tile), (range(complete, size), size - complete)]
    return [(span, length) for span, length in spans if len(span)]


def _tile_indices(part: slice, side: int) -> slice:
    """Return which tiles a part of a dimension covers; it begins with a tile."""
    return slice(part.start // side, -(-part.stop // side))


def tile_magnitudes(x: Tensor, block: Block) -> Tensor:
    """Return |x| of a [rows, cols] matrix as [R, tile rows, C, tile cols]; zeros fill the last."""
    rows, cols = x.shape
    tall, wide = block
    magnitude = x.abs()
    missing = (0, -cols % wide, 0, -rows % tall)
    if any(missing):
        magnitude = torch.nn.functional.pad(magnitude, missing)
    return magnitude.view(-(-rows // tall), tall, -(-cols // wide), wide)


def tile_amaxes(x: Tensor, block: Block) -> Tensor:
    """Return the largest magnitude of each tile of x [rows, cols], FP32 [R, 1, C, 1]."""
    return _tile_amax(tile_magnitudes(x, block)).float().contiguous()


def _tile_amax(magnitude: Tensor) -> Tensor:
    """Return each tile's largest magnitude: [R, r, C, c] -> [R, 1, C, 1]; NaN if it holds NaN."""
    width = magnitude.shape[3]
    while width % 2 == 0 and 1 < width <= _SHORT_TILE:
        # PyTorch reduces short runs element by element; halving them uses its vector units
        width //= 2
        magnitude = torch.maximum(magnitude[..., :width], magnitude[..., width:])
    if width > 1:
        magnitude = magnitude.amax(3, keepdim=True)
    return magnitude.amax(1, keepdim=True) if magnitude.shape[1] > 1 else magnitude


def tile_scales(
    amax: Tensor, fmt: Format, amax_or_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (encode, decode): multiply by the first to quantize, by the second to dequantize.

    Args:
        amax: contiguous, FP32, non-negative or NaN; the largest magnitude of each tile.
        fmt: a quantized format.
        amax_or_scale: FP32 scalar, see `quantize_dequantize`.

    Returns:
        FP32 of amax's shape, both.
    """
    assert fmt.element is not None
    largest = fmt.element.max_value
    if fmt.has_tensor_scale:
        assert amax_or_scale is not None
        is_given = fmt.scale is ScaleType.DELAYED
        encode = amax_or_scale if is_given else tensor_scale(amax_or_scale, fmt.element)
        return encode.expand_as(amax), _divide_into(1.0, encode).expand_as(amax)
    if fmt.scale is ScaleType.E4M3:
        assert amax_or_scale is not None
        tensor = _divide(_floor(amax_or_scale, fmt.element), E4M3.max_value * largest)
        ratio = _divide(_poison(amax), largest) / tensor
        stored = ratio.clamp_(2.0**E4M3.min_exponent, E4M3.max_value)
        round_in_place(stored, E4M3, torch.empty_like(stored, dtype=torch.int32))
        return _divide_into(1.0, tensor) / stored, stored * tensor
    if fmt.scale is ScaleType.E4M3_TE:
        assert amax_or_scale is not None
        top = _floor(amax_or_scale, fmt.element)
        tensor = _divide_into(E4M3.max_value * largest, top)
        stored = (_poison(amax) * (tensor * (1.0 / largest))).clamp_max_(E4M3.max_value)
        round_in_place(stored, E4M3, torch.empty_like(stored, dtype=torch.int32))
        encode = _divide_into(1.0, stored * _divide_into(1.0, tensor))
        # Powers of two keep the product finite and change no bit.
        decode = stored * (top * 2.0**-12) * (2.0**12 / (E4M3.max_value * largest))
        return torch.where(stored == 0, 0.0, encode), decode
    floored = _floor(amax, fmt.element)
    decode = _divide(floored, largest)
    if fmt.scale is ScaleType.E8M0:
        # The next power of two: the sum carries into the exponent unless the mantissa is 0. NaN
        # stays.
        bits = (decode.view(torch.int32) + 0x007FFFFF).bitwise_and_(_EXPONENT_MASK)
        decode = torch.where(decode.isnan(), decode, bits.view(torch.float32))
        return decode.reciprocal(), decode
    return _divide_into(largest, floored), decode


def amax_or_scale_of(x: Tensor, given: Tensor | None, fmt: Format) -> Tensor | None:
    """Return x's `amax_or_scale`: `given`, or its largest magnitude; None if none is needed."""
    if not fmt.needs_amax_or_scale:
        return None
    if given is None:
        assert fmt.scale is not ScaleType.DELAYED, "scales are given"
        return amax_of(x)
    return given.to(device=x.device, dtype=torch.float32)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of x, an FP32 scalar; 0 if x is empty, NaN if it holds NaN."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    amax: Tensor = torch.linalg.vector_norm(x, ord=math.inf, dtype=torch.float32)
    return amax


def tensor_scale(amax: Tensor, element: ElementType) -> Tensor:
    """Return the scale of current scaling: it makes the largest magnitude the element's largest."""
    return _divide_into(element.max_value, _floor(amax, element))


def _floor(amax: Tensor, element: ElementType) -> Tensor:
    return _poison(amax).clamp_min_(element.least_amax)


def _poison(amax: Tensor) -> Tensor:
    """Return amax with Inf turned into NaN."""
    return amax + (amax - amax)


# Divisions take no Python scalars: PyTorch computes scalar / t as t.reciprocal() * scalar and, on
# CUDA, t / scalar as t * (1 / scalar), each with two roundings.
def _divide(numerator: Tensor, scalar: float) -> Tensor:
    return numerator / torch.full_like(numerator, scalar)


def _divide_into(scalar: float, denominator: Tensor) -> Tensor:
    return torch.full_like(denominator, scalar) / denominator


def round_in_place(
    y: Tensor, element: ElementType, scratch: Tensor, bits16: Tensor | None = None
) -> None:
    """Round `y` to the element type's grid, in place; NaN stays NaN, zeros come out as +0.

    Args:
        y: FP32 numbers within [-max_value, max_value] up to two roundings, or NaN; overwritten.
        element: The element type whose grid is rounded to.
        scratch: Memory of y's shape, int32; overwritten.
        bits16: Random numbers of y's shape, int16, uniform over all 65536 values, for stochastic
            rounding (unbiased to within 2^-17 of a step); None rounds to nearest, ties to even.
    """
    power = scratch.view(torch.float32)  # p, once only the exponent field is left
    torch.bitwise_and(y.view(torch.int32), _EXPONENT_MASK, out=scratch)
    scratch.clamp_min_((element.min_exponent + 127) << 23)  # FP32 bits of 2^e_min
    if bits16 is not None:
        noise = bits16.to(torch.float32).add_(0.5)
        y.addcmul_(noise, power, value=2.0 ** (-16 - element.mantissa_bits))
    anchor = 1.5 * 2.0 ** (23 - element.mantissa_bits)  # c / p
    y.add_(power, alpha=anchor).sub_(power, alpha=anchor)
