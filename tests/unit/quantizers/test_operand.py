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
    wanted = quantize_dequantize(
        x.view(150, 96), fmt, operand_block(fmt, operand, gemm), stream=stream
    )
    got = quantize_dequantize_operand(x, name, operand, gemm, stream=STREAM)
    assert torch.equal(got, wanted.view(3, 50, 96))
    values = quantize_operand(x, name, operand, gemm, stream=STREAM)
    assert torch.equal(values.dequantize(), wanted)


def test_only_grad_output_of_low_formats_is_stochastic():
    stochastic = {(n, o) for n, f in FORMATS.items() for o in Operand if is_stochastic(f, o)}
    wanted = {(n, Operand.GRAD_OUTPUT) for n in ("fp4", "mxfp4", "nvfp4", "fp3")}
    assert stochastic == wanted


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
    assert [n for n, f in FORMATS.items() if needs_tensor_amax(f)] == ["nvfp4"]


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
