"""The FP8 GEMM's layouts, padding and transposes, on the CPU from the bytes a device would read."""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron_snip.linears.native_gemm import (
    GemmOperand,
    check_layout,
    emulated_mm,
    multiply,
    operand,
)
from megatron_snip.quantizers.routes import Payload, quantize_payload

from megatron_snip.formats import FORMATS

BLOCKS = (1, 2, 3, 5, 8)


def payload(rows: int, cols: int, block: tuple[int, int], seed: int = 0) -> Payload:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (rows, cols), generator=generator).float())
    x = torch.randn(rows, cols, generator=generator) * spread
    return quantize_payload(x, FORMATS["fp8"], block)


def truth(a: Payload, b: Payload, transposed: bool = False) -> torch.Tensor:
    """A B^T in FP64 from dequantized operands; `transposed` takes both payloads' transposes."""
    left, right = a.dequantize().double(), b.dequantize().double()
    return left.t() @ right if transposed else left @ right.t()


def close(found: torch.Tensor, wanted: torch.Tensor, depth: int) -> bool:
    """Within FP32 summation; wrong scales are off by factors."""
    bound = (128 + depth / 128) * 2.0**-24 * wanted.abs().max() * depth**0.5
    return bool((found.double() - wanted).abs().max() <= bound)


@pytest.mark.parametrize("depth", BLOCKS)
@pytest.mark.parametrize("other", [1, 3, 4])
def test_row_by_square(depth: int, other: int) -> None:
    """fprop's and dgrad's pair; grids are square in some cases and not in others."""
    a = payload(96, 128 * depth, (1, 128))
    b = payload(128 * other, 128 * depth, (128, 128), seed=1)
    left, right = operand(a), operand(b)
    assert right.square and right.scales.shape == (-(-depth // 4) * 4, other)
    assert right.scales.stride() == (1, right.scales.shape[0])
    assert left.scales.stride() == (1, 96)
    assert close(multiply(left, right, torch.float32), truth(a, b), 128 * depth)


@pytest.mark.parametrize("depth", BLOCKS)
def test_the_transposed_bytes_of_a_weight_serve_dgrad(depth: int) -> None:
    w = payload(128 * depth, 384, (128, 128))  # [N, K], contracted along N
    g = payload(64, 128 * depth, (1, 128), seed=1)
    wanted = g.dequantize().double() @ w.dequantize().double()
    found = multiply(operand(g), operand(w, transpose=True), torch.float32)
    assert close(found, wanted, 128 * depth)


@pytest.mark.parametrize("depth", BLOCKS)
def test_tokens_by_tokens(depth: int) -> None:
    """wgrad's pair, contracted along tokens."""
    g = payload(128 * depth, 256, (128, 1))
    x = payload(128 * depth, 144, (128, 1), seed=1)
    left, right = operand(g, transpose=True), operand(x, transpose=True)
    assert left.scales.shape == (256, depth) and right.scales.shape == (144, depth)
    found = multiply(left, right, torch.float32)
    assert close(found, truth(g, x, transposed=True), 128 * depth)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", itertools.product((1, 17, 128), (5, 200), (3, 130, 250)))
def test_ragged_dims_are_padded_and_cut_off(shape: tuple[int, int, int], square: bool) -> None:
    rows, cols, depth = shape
    a, b = payload(rows, depth, (1, 128)), payload(cols, depth, (128 if square else 1, 128), 1)
    left, right = operand(a), operand(b)
    assert all(side % 16 == 0 for o in (left, right) for side in o.codes.shape)
    found = multiply(left, right, torch.float32)
    assert found.shape == (rows, cols) and found.is_contiguous()
    assert close(found, truth(a, b), depth)


@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 0, 4), (4, 4, 0)])
def test_empty_dims(shape: tuple[int, int, int]) -> None:
    """An expert without tokens: no rows, or a contraction over none, which is zero."""
    rows, cols, depth = shape
    a, b = payload(rows, depth, (1, 128)), payload(cols, depth, (1, 128))
    found = multiply(operand(a), operand(b), torch.bfloat16)
    assert found.shape == (rows, cols) and not found.any()


def test_a_nan_tile_is_nan_in_its_outputs_alone() -> None:
    x = torch.randn(32, 256)
    x[3, 200] = float("nan")
    a = quantize_payload(x, FORMATS["fp8"], (1, 128))
    found = multiply(operand(a), operand(payload(16, 256, (1, 128))), torch.float32)
    assert found.isnan().any(1).nonzero().flatten().tolist() == [3]


def test_kernels_layouts_are_taken_without_a_copy() -> None:
    codes = torch.zeros(128, 256, dtype=torch.uint8)
    scales = torch.ones(2, 128).t()
    taken = operand(Payload(codes, scales, (1, 128), FORMATS["fp8"]))
    assert taken.codes.data_ptr() == codes.data_ptr()
    assert taken.scales.data_ptr() == scales.data_ptr()
    turned = torch.zeros(256, 128, dtype=torch.uint8).t()  # [128, 256], column-major
    rows = torch.ones(1, 256)
    taken = operand(Payload(turned, rows, (128, 1), FORMATS["fp8"]), transpose=True)
    assert taken.codes.data_ptr() == turned.data_ptr()
    assert taken.scales.data_ptr() == rows.data_ptr()


def wrong(a: GemmOperand, b: GemmOperand, scales: torch.Tensor) -> torch.Tensor:
    return emulated_mm(a.codes, a.scales, b.codes, scales, b.square)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_what_a_device_would_refuse_or_misread_is_refused(depth: int) -> None:
    """Unpadded or transposed 128 x 128 scales, and row-major 1 x 128 ones."""
    a = operand(payload(64, 128 * depth, (1, 128)))
    b = operand(payload(384, 128 * depth, (128, 128)))
    unpadded = torch.ones(3, depth).t()
    with pytest.raises(ValueError, match="B's scales must be FP32"):
        wrong(a, b, unpadded)
    with pytest.raises(ValueError, match="B's scales must be FP32"):
        wrong(a, b, b.scales.contiguous().t())
    rows = operand(payload(384, 128 * depth, (1, 128)))
    if depth > 1:
        with pytest.raises(ValueError, match="B's scales must be FP32"):
            wrong(a, rows, rows.scales.contiguous())
    with pytest.raises(ValueError, match="A's codes must be uint8, row-major"):
        check_layout(a.codes.t(), a.scales, b.codes, b.scales, b.square)
    with pytest.raises(ValueError, match="multiples of 16"):
        check_layout(a.codes[:5], a.scales, b.codes, b.scales, b.square)


def test_the_emulation_reads_memory_and_not_shapes() -> None:
    """The same numbers in another order in memory give another product."""
    a, b = payload(64, 384, (1, 128)), payload(256, 384, (128, 128), seed=1)
    left, right = operand(a), operand(b)
    shuffled = right.scales.clone(memory_format=torch.preserve_format)
    shuffled.as_strided((8,), (1,))[:3] = right.scales.as_strided((8,), (1,))[[1, 2, 0]]
    assert shuffled.stride() == right.scales.stride()
    assert not close(wrong(left, right, shuffled), truth(a, b), 384)


def test_operands_that_do_not_fit_are_refused() -> None:
    a, square = operand(payload(16, 128, (1, 128))), operand(payload(128, 128, (128, 128)))
    with pytest.raises(ValueError, match="first operand's scales are 128x128"):
        multiply(square, a, torch.float32)
    with pytest.raises(ValueError, match="cannot multiply"):
        multiply(a, operand(payload(16, 256, (1, 128))), torch.float32)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        multiply(a, square, torch.float16)
    with pytest.raises(ValueError, match="tiles of 1x128 or 128x128, got 1x32"):
        operand(payload(16, 128, (1, 32)))


def test_torch_compile_sees_one_opaque_call() -> None:
    """Its fake result has the real one's shape and dtype."""
    a, b = operand(payload(32, 128, (1, 128))), operand(payload(48, 128, (1, 128)))
    arguments = (a.codes, a.scales, b.codes, b.scales, False, False)
    torch.library.opcheck(
        torch.ops.megatron_snip.block_scaled_mm.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
