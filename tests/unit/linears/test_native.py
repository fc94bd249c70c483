"""Native GEMMs against simulated ones: the same operands, another order of accumulation."""

from __future__ import annotations

import pytest
import torch
from megatron_snip.linears.native_gemm import GemmOperand
from megatron_snip.quantizers.codes import decode_e4m3, encode_e4m3

from megatron_snip.formats import FORMATS
from megatron_snip.linears import gemms, native
from megatron_snip.options import Option
from megatron_snip.quantizers import (
    StochasticStream,
    StreamKey,
    quantize_dequantize_operand,
    quantize_payload_operand,
)
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand

STREAM = StochasticStream(StreamKey(0, "linear", 1, 2))
NATIVE = ("fp8", "fp4", "fp3")
ENTRIES = [(gemm, operand) for gemm, pair in GEMM_OPERANDS.items() for operand in pair]


def tensors(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """X, W, G whose tiles differ in scale by powers of two."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        spread = torch.exp2(torch.randint(-4, 4, shape, generator=generator).float())
        return (torch.randn(shape, generator=generator) * spread).to(dtype)

    return [draw(m, k), draw(n, k), draw(m, n)]


@pytest.mark.parametrize("name", NATIVE)
def test_every_value_of_the_grid_is_an_e4m3_value(name: str) -> None:
    """So bytes hold FP4 (and FP3) operands exactly: 0, .5, 1, 1.5, 2, 3, 4, 6."""
    element = FORMATS[name].element
    assert element is not None
    step = 2.0 ** (element.min_exponent - element.mantissa_bits)
    values = torch.arange(0, element.max_value + step, step)
    exponent = torch.floor(torch.log2(values.clamp(min=2.0**element.min_exponent)))
    grid = values[values % torch.exp2(exponent - element.mantissa_bits) == 0]
    assert len(grid) == {"fp8": 127, "fp4": 8, "fp3": 4}[name]
    both = torch.cat((grid, -grid))
    assert torch.equal(decode_e4m3(encode_e4m3(both)), both)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize(("gemm", "role"), ENTRIES)
def test_operands_are_those_of_simulate_bit_for_bit(name: str, gemm: Gemm, role: Operand) -> None:
    x = tensors(200, 272, 144)[0]
    wanted = quantize_dequantize_operand(x, name, role, gemm, stream=STREAM, dtype=torch.float32)
    payload = quantize_payload_operand(x, name, role, gemm, stream=STREAM)
    assert torch.equal(payload.dequantize(), wanted)


def forms(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, option: Option) -> list[torch.Tensor]:
    """Y, dX, dW by native GEMMs."""
    x_row, x_tokens = native.input_operands(x, option, True, True)
    g_row, g_tokens = native.grad_operands(g, option, STREAM, True, True)
    forward, backward = (
        native.weight_operand(w, option, gemm, lambda _, make: make())
        for gemm in (Gemm.FPROP, Gemm.DGRAD)
    )
    assert x_row and x_tokens and g_row and g_tokens
    return [
        native.fprop(x_row, forward, x.dtype),
        native.dgrad(g_row, backward, g.dtype),
        native.wgrad(g_tokens, x_tokens),
    ]


SHAPES = [(128, 128, 128), (256, 128, 640), (640, 384, 256), (1024, 256, 384), (200, 272, 144)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["fp8", "fp4", "fp8-fp4-fp8", "fp4-fp3-fp4", "fp8_pow2-fp4_pow2-fp8"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_difference_to_simulate_is_the_order_of_accumulation(
    shape: tuple[int, int, int], name: str, dtype: torch.dtype
) -> None:
    x, w, g = tensors(*shape, dtype)
    option = Option.parse(name)
    found = forms(x, w, g, option)
    wanted = [
        gemms.fprop(x, w, option),
        gemms.dgrad(g, w, option, STREAM),
        gemms.wgrad(g, x, option, STREAM),
    ]
    pairs = ((x, w, Gemm.FPROP), (g, w, Gemm.DGRAD), (g, x, Gemm.WGRAD))
    depths = (shape[1], shape[2], shape[0])
    for ours, theirs, pair, depth in zip(found, wanted, pairs, depths, strict=True):
        size = magnitude(pair, option)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        bound = native.EMULATION_ULPS * (128 + depth / 128) * 2.0**-24 * size
        if ours.dtype == torch.bfloat16:  # both are rounded, maybe apart: one step of BF16
            bound = bound + theirs.double().abs() * 2.0**-7
        assert bool(((ours.double() - theirs.double()).abs() <= bound).all())


def magnitude(pair: tuple[torch.Tensor, torch.Tensor, Gemm], option: Option) -> torch.Tensor:
    """Sum of the magnitudes of each output's products."""
    left, right, gemm = pair
    roles = GEMM_OPERANDS[gemm]
    a, b = (
        quantize_dequantize_operand(t, option[gemm], r, gemm, stream=STREAM, dtype=torch.float32)
        .double()
        .abs()
        for t, r in zip((left, right), roles, strict=True)
    )
    if gemm is Gemm.FPROP:
        return a @ b.t()
    return a @ b if gemm is Gemm.DGRAD else a.t() @ b


def test_one_read_gives_what_two_reads_give() -> None:
    x, _, g = tensors(256, 128, 384)
    option = Option.parse("fp8-fp4-fp4")
    both = native.input_operands(x, option, True, True)
    assert same(both[0], native.input_operands(x, option, True, False)[0])
    assert same(both[1], native.input_operands(x, option, False, True)[1])
    both = native.grad_operands(g, option, STREAM, True, True)
    assert same(both[0], native.grad_operands(g, option, STREAM, True, False)[0])
    assert same(both[1], native.grad_operands(g, option, STREAM, False, True)[1])
    assert native.grad_operands(g, option, STREAM, False, False) == (None, None)


def same(a: GemmOperand | None, b: GemmOperand | None) -> bool:
    assert a is not None and b is not None
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)


def test_weights_are_kept_by_format_and_gemm() -> None:
    w = tensors(16, 128, 256)[1]
    seen: dict[object, GemmOperand] = {}

    def keep(form: object, make: object) -> GemmOperand:
        assert callable(make)
        if form not in seen:
            seen[form] = make()
        return seen[form]

    for text in ("fp8", "fp4", "fp8-fp4-fp8", "fp8"):
        for gemm in (Gemm.FPROP, Gemm.DGRAD):
            native.weight_operand(w, Option.parse(text), gemm, keep)
    assert len(seen) == 4
    bytes_each = {form.nbytes for form in seen.values()}
    assert all(w.numel() <= size <= w.numel() * 1.01 for size in bytes_each)
