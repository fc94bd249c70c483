"""Each operand of each GEMM gets its tiles, direction and rounding."""

import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import (
    HadamardTransform,
    Rounding,
    StochasticStream,
    StreamKey,
    is_stochastic,
    needs_tensor_amax,
    operand_block,
    quantize_dequantize,
    quantize_dequantize_operand,
    quantize_operand,
)
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand

STREAM = StochasticStream(StreamKey(0, "decoder.layers.0.self_attention.linear_qkv", 1, 0))
ENTRIES = [(gemm, operand) for gemm, pair in GEMM_OPERANDS.items() for operand in pair]


@pytest.mark.parametrize(
    ("operand", "gemm", "fp4", "mxfp4"),
    [
        (Operand.INPUT, Gemm.FPROP, (1, 128), (1, 32)),
        (Operand.WEIGHT, Gemm.FPROP, (128, 128), (1, 32)),
        (Operand.GRAD_OUTPUT, Gemm.DGRAD, (1, 128), (1, 32)),
        (Operand.WEIGHT, Gemm.DGRAD, (128, 128), (32, 1)),
        (Operand.GRAD_OUTPUT, Gemm.WGRAD, (128, 1), (32, 1)),
        (Operand.INPUT, Gemm.WGRAD, (128, 1), (32, 1)),
    ],
)
def test_tiles_run_along_the_contraction(operand, gemm, fp4, mxfp4):
    assert operand_block(FORMATS["fp4"], operand, gemm) == fp4
    assert operand_block(FORMATS["mxfp4"], operand, gemm) == mxfp4


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.quantized])
@pytest.mark.parametrize(("gemm", "operand"), ENTRIES)
def test_operands_are_quantized_in_their_tiles(name, gemm, operand):
    fmt, x = FORMATS[name], torch.randn(3, 50, 96)
    stream = STREAM.for_role(operand, gemm) if is_stochastic(fmt, operand) else None
    source = x.view(150, 96)
    if fmt.wgrad_hadamard and gemm is Gemm.WGRAD:
        source = HadamardTransform(fmt.wgrad_hadamard).apply(source)
    wanted = quantize_dequantize(source, fmt, operand_block(fmt, operand, gemm), stream=stream)
    got = quantize_dequantize_operand(x, name, operand, gemm, stream=STREAM)
    assert torch.equal(got, wanted.view(3, 50, 96))
    values = quantize_operand(x, name, operand, gemm, stream=STREAM)
    assert torch.equal(values.dequantize(), wanted)


def test_only_grad_output_of_low_formats_is_stochastic():
    stochastic = {(n, o) for n, f in FORMATS.items() for o in Operand if is_stochastic(f, o)}
    wanted = {(n, Operand.GRAD_OUTPUT) for n, f in FORMATS.items() if f.bits <= 4}
    assert stochastic == wanted


@pytest.mark.parametrize("name", ["fp4_rht", "nvfp4_rht"])
def test_a_rotated_wgrad_is_the_same_product(name):
    """Both operands rotate alike; an outlier spreads over the others of a long tile."""
    generator = torch.Generator().manual_seed(3)
    g, x = (torch.randn(1024, n, generator=generator) for n in (48, 64))
    rows = torch.randperm(1024, generator=generator)[:60]
    x[rows] *= 20.0
    exact = g.double().t() @ x.double()

    def error(fmt_name):
        g_q = quantize_dequantize_operand(
            g, fmt_name, Operand.GRAD_OUTPUT, Gemm.WGRAD, stream=STREAM, dtype=torch.float64
        )
        x_q = quantize_dequantize_operand(
            x, fmt_name, Operand.INPUT, Gemm.WGRAD, dtype=torch.float64
        )
        return ((g_q.t() @ x_q - exact).norm() / exact.norm()).item()

    plain = error(name.removesuffix("_rht"))
    assert error(name) < min(0.25, (0.9 if FORMATS[name].tile == 128 else 1.2) * plain)
    for operand in (Operand.INPUT, Operand.WEIGHT):  # fprop has tokens of its own on both sides
        a, b = (
            quantize_dequantize_operand(x, n, operand, Gemm.FPROP)
            for n in (name, name.removesuffix("_rht"))
        )
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["fp8_pow2", "fp4_pow2"])
def test_power_of_two_scales_are_rounded_up(name):
    x = torch.randn(64, 256) * torch.exp2(torch.randint(-30, 30, (64, 1)))
    found = quantize_operand(x, name, Operand.INPUT, Gemm.FPROP)
    exact = quantize_operand(x, name.removesuffix("_pow2"), Operand.INPUT, Gemm.FPROP).scales
    assert (torch.frexp(found.scales)[0] == 0.5).all()
    ratio = found.scales / exact
    assert ratio.min() >= 1.0
    assert ratio.max() < 2.0


def test_the_two_copies_of_grad_output_round_independently():
    x = torch.randn(128, 128)
    fine = [
        quantize_operand(x, "fp4", Operand.GRAD_OUTPUT, gemm, stream=STREAM).values
        for gemm in (Gemm.DGRAD, Gemm.WGRAD)
    ]
    nearest = [
        quantize_operand(x, "fp4", Operand.GRAD_OUTPUT, gemm, rounding=Rounding.NEAREST_EVEN).values
        for gemm in (Gemm.DGRAD, Gemm.WGRAD)
    ]
    up = [(a != b).double().flatten() for a, b in zip(fine, nearest, strict=True)]
    together = torch.corrcoef(torch.stack(up))[0, 1]
    # both depend on x, hence some correlation; one stream for both gives over 0.9
    assert together < 0.6


def test_rounding_can_be_forced():
    x = torch.randn(8, 128)
    nearest = quantize_dequantize_operand(
        x, "fp4", Operand.GRAD_OUTPUT, Gemm.DGRAD, rounding=Rounding.NEAREST_EVEN
    )
    assert torch.equal(nearest, quantize_dequantize(x, FORMATS["fp4"], (1, 128)))
    forced = quantize_dequantize_operand(
        x, "fp8", Operand.INPUT, Gemm.FPROP, stream=STREAM, rounding=Rounding.STOCHASTIC
    )
    assert not torch.equal(forced, quantize_dequantize(x, FORMATS["fp8"], (1, 128)))


def test_bf16_changes_nothing():
    x = torch.randn(4, 6, requires_grad=True)
    out = quantize_dequantize_operand(x, "bf16", Operand.INPUT, Gemm.WGRAD)
    assert out.data_ptr() == x.data_ptr() and not out.requires_grad


def test_the_dtype_is_the_inputs_unless_asked():
    x = torch.randn(4, 6).bfloat16()
    args = ("fp8", Operand.INPUT, Gemm.FPROP)
    assert quantize_dequantize_operand(x, *args).dtype == torch.bfloat16
    assert quantize_dequantize_operand(x, *args, dtype=torch.float32).dtype == torch.float32


def test_which_formats_need_the_amax_of_all_shards():
    assert [n for n, f in FORMATS.items() if needs_tensor_amax(f)] == ["nvfp4", "nvfp4_rht"]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("fp4", Operand.GRAD_OUTPUT, Gemm.DGRAD), {}, "stream"),
        (("fp4", Operand.INPUT, Gemm.DGRAD), {}, "does not enter"),
        (("fp4", Operand.INPUT, Gemm.FPROP), {"hadamard": HadamardTransform()}, "wgrad"),
        (("bf16", Operand.INPUT, Gemm.FPROP), {}, "not quantized"),
    ],
)
def test_misuse_is_refused(args, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_operand(torch.ones(4, 4), *args, **options)
