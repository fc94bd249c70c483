"""Block-scaled FP8 GEMM on tensor cores, and the same GEMM on the CPU from the same bytes.

    out [rows, cols] = A [rows, depth] B [cols, depth]^T

Both operands are E4M3 bytes (uint8), row-major, so the contraction runs along memory. Scales are
FP32 decode scales; with `depth blocks` = ceil(depth / 128) they lie in memory as cuBLAS reads them:

    1 x 128     of A or B   [rows, depth blocks], strides (1, rows): all rows of a block together
    128 x 128   of B only   [depth blocks rounded up to 4, ceil(rows / 128)], strides (1, that
                            number of depth blocks): the blocks of one row block together

(128 x 128 by 128 x 128 does not exist.) All three dims are padded with zeros to multiples of 16,
which cuts no scale block: 128 is a multiple of 16. A library that has no GEMM for such dims is met
by padding to 128 (`align_to`); scales stay those of the blocks that hold something, so the result
is the same.

The three GEMMs of a linear take

    fprop   A = X   [M, K] 1 x 128     B = W   [N, K] 128 x 128
    dgrad   A = G   [M, N] 1 x 128     B = W^T [K, N] 128 x 128, the transposed bytes of the same
    wgrad   A = G^T [N, M] 1 x 128     B = X^T [K, M] 1 x 128, both along tokens

E2M1 and E2M0 values are E4M3 values, so FP4's payload is exact here under its own scales. Hopper
(compute capability 9.0) alone multiplies so; elsewhere there is the emulation, which reads the
scales from raw memory by the formulas above and not by their shape, so that a layout that would
be wrong on the device is wrong on the CPU as well.

Sources: cuBLAS's 128-element 1-D and 128x128 2-D block scaling for FP8 (section 3.1.4.5: shapes
by ceilings, M and N multiples of 4, scales 16-byte aligned); the checks of `torch._scaled_mm_v2`
(aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_snip.quantizers.codes import decode_e4m3
from megatron_snip.quantizers.routes import Payload

TILE = 128
ALIGNMENT = 16
"""All dims of a GEMM are multiples of this (E4M3 rows of whole 16-byte words)."""

_alignment = ALIGNMENT

SCALE_ALIGNMENT = 4
"""Depth blocks of 128 x 128 scales are padded to a multiple of this (16 bytes)."""


@dataclass(frozen=True)
class GemmOperand:
    """A quantized matrix as the GEMM takes it.

    Attributes:
        codes: uint8 [rows, depth] padded to multiples of 16 or 128, row-major E4M3 bytes.
        scales: FP32 in the layout of the file's description.
        rows: before padding.
        depth: before padding, the contraction's length.
        square: whether scales are 128 x 128 (else 1 x 128).
    """

    codes: Tensor
    scales: Tensor
    rows: int
    depth: int
    square: bool

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.codes.nbytes + self.scales.nbytes


def align_to(multiple: int) -> None:
    """Pad the dims of operands made from now on to multiples of 16 (the default) or 128."""
    global _alignment
    assert multiple in (ALIGNMENT, TILE)
    _alignment = multiple


def alignment() -> int:
    """Return what dims of operands are padded to multiples of."""
    return _alignment


def operand(payload: Payload, transpose: bool = False) -> GemmOperand:
    """Lay a payload out for the GEMM.

    Args:
        payload: of tiles 1 x 128 (128 x 1 if `transpose`) or 128 x 128; bytes and scales in the
            layouts that `quantize_payload_both` gives are taken without a copy.
        transpose: take the payload's transpose, so that the contraction runs along its rows.

    Raises:
        ValueError: on other tiles.
    """
    codes, grid, block = payload.codes, payload.scales, payload.block
    if transpose:
        codes, grid, block = codes.T, grid.T, (block[1], block[0])
    square = block == (TILE, TILE)
    if not square and block != (1, TILE):
        raise ValueError(f"the GEMM takes tiles of 1x128 or 128x128, got {block[0]}x{block[1]}")
    rows, depth = codes.shape
    scales = _square_scales(grid) if square else _row_scales(grid, _aligned(rows))
    return GemmOperand(_padded(codes), scales, rows, depth, square)


def multiply(a: GemmOperand, b: GemmOperand, dtype: torch.dtype) -> Tensor:
    """Return A B^T.

    Args:
        a: [rows, depth], 1 x 128 scales.
        b: [cols, depth], 1 x 128 or 128 x 128 scales.
        dtype: of the result, BF16 or FP32; accumulated in FP32 on the CPU, and as tensor cores do
            (each 128 of the depth promoted to FP32) on a GPU.

    Returns:
        [a.rows, b.rows], contiguous.

    Raises:
        ValueError: if the operands do not fit together.
    """
    if a.depth != b.depth or a.square:
        raise ValueError(
            f"cannot multiply [{a.rows}, {a.depth}] by [{b.rows}, {b.depth}]^T"
            + (": the first operand's scales are 128x128" if a.square else "")
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the GEMM's output is bfloat16 or float32, got {dtype}")
    if 0 in (a.rows, b.rows, a.depth):
        return torch.zeros((a.rows, b.rows), dtype=dtype, device=a.codes.device)
    out: Tensor = _op(a.codes, a.scales, b.codes, b.scales, b.square, dtype == torch.float32)
    return out[: a.rows, : b.rows].contiguous()


@torch.library.custom_op("megatron_snip::block_scaled_mm", mutates_args=())
def _op(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, square: bool, fp32: bool
) -> Tensor:
    """[rows, depth] x [cols, depth]^T of padded operands; opaque to torch.compile."""
    dtype = torch.float32 if fp32 else torch.bfloat16
    if not a.is_cuda:
        return emulated_mm(a, a_scales, b, b_scales, square).to(dtype)
    from torch.nn.functional import ScalingType, scaled_mm

    result: Tensor = scaled_mm(
        a.view(torch.float8_e4m3fn),
        b.view(torch.float8_e4m3fn).t(),
        a_scales,
        ScalingType.BlockWise1x128,
        b_scales,
        ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
        output_dtype=dtype,
    )
    return result


@_op.register_fake
def _(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, square: bool, fp32: bool) -> Tensor:
    dtype = torch.float32 if fp32 else torch.bfloat16
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def emulated_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    square: bool,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return what the GEMM computes from these bytes: block by block of the depth.

    Args:
        a: uint8 [rows, depth].
        a_scales: 1 x 128, in the device's layout.
        b: uint8 [cols, depth].
        b_scales: 1 x 128 or 128 x 128, in the device's layout.
        square: which.
        dtype: of products and sums: FP32, or FP64 to check with.

    Raises:
        ValueError: on a layout that the device would refuse.
    """
    check_layout(a, a_scales, b, b_scales, square)
    rows, cols = a.shape[0], b.shape[0]
    depth_blocks = -(-a.shape[1] // TILE)
    of_a, of_b = _memory(a_scales).to(dtype), _memory(b_scales).to(dtype)
    pitch = _rounded(depth_blocks, SCALE_ALIGNMENT)
    x, y = decode_e4m3(a).to(dtype), decode_e4m3(b).to(dtype)
    out = torch.zeros((rows, cols), dtype=dtype, device=a.device)
    for block in range(depth_blocks):
        span = slice(block * TILE, (block + 1) * TILE)
        left = of_a[block * rows : (block + 1) * rows]
        if square:
            right = of_b[block::pitch].repeat_interleave(TILE)[:cols]
        else:
            right = of_b[block * cols : (block + 1) * cols]
        out += (x[:, span] @ y[:, span].t()) * (left[:, None] * right[None, :])
    return out


def check_layout(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, square: bool) -> None:
    """Refuse what the device would refuse.

    Raises:
        ValueError: naming the operand, what it is and what it should be.
    """
    for name, codes in (("A", a), ("B", b)):
        if codes.dtype != torch.uint8 or codes.stride() != (codes.shape[1], 1):
            raise ValueError(f"{name}'s codes must be uint8, row-major; got {_said(codes)}")
        if codes.shape[0] % ALIGNMENT or codes.shape[1] % ALIGNMENT:
            raise ValueError(f"{name}'s dims must be multiples of 16; got {_said(codes)}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"depths differ: {a.shape[1]} and {b.shape[1]}")
    blocks = -(-a.shape[1] // TILE)
    _check_scales("A", a_scales, (a.shape[0], blocks))
    if square:
        pitch = _rounded(blocks, SCALE_ALIGNMENT)
        _check_scales("B", b_scales, (pitch, -(-b.shape[0] // TILE)))
    else:
        _check_scales("B", b_scales, (b.shape[0], blocks))


def _check_scales(name: str, scales: Tensor, shape: tuple[int, int]) -> None:
    wanted = (1, shape[0])
    if scales.dtype != torch.float32 or tuple(scales.shape) != shape or scales.stride() != wanted:
        raise ValueError(
            f"{name}'s scales must be FP32 {list(shape)} with strides {wanted}; got {_said(scales)}"
        )


def _said(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"


def _memory(scales: Tensor) -> Tensor:
    """The scales' numbers in the order in which they lie in memory."""
    return scales.as_strided((scales.numel(),), (1,))


def _row_scales(grid: Tensor, rows: int) -> Tensor:
    """Lay [rows, depth blocks] out with strides (1, rows), with zeros for padded rows."""
    if grid.shape[0] == rows and grid.stride() == (1, rows):
        return grid
    out = torch.empty_strided(
        (rows, grid.shape[1]), (1, rows), dtype=grid.dtype, device=grid.device
    )
    out[: grid.shape[0]].copy_(grid)
    out[grid.shape[0] :].zero_()
    return out


def _square_scales(grid: Tensor) -> Tensor:
    """Lay [row blocks, depth blocks] out as [padded depth blocks, row blocks], depth first."""
    row_blocks, depth_blocks = grid.shape
    pitch = _rounded(depth_blocks, SCALE_ALIGNMENT)
    out = torch.empty_strided((pitch, row_blocks), (1, pitch), dtype=grid.dtype, device=grid.device)
    out[:depth_blocks].copy_(grid.T)
    out[depth_blocks:].zero_()
    return out


def _padded(codes: Tensor) -> Tensor:
    rows, depth = codes.shape
    extra = (_aligned(rows) - rows, _aligned(depth) - depth)
    if extra == (0, 0):
        return codes.contiguous()
    return torch.nn.functional.pad(codes, (0, extra[1], 0, extra[0]))


def _aligned(length: int) -> int:
    return _rounded(length, _alignment)


def _rounded(length: int, step: int) -> int:
    return -(-length // step) * step
