"""Two GEMMs' copies of an operand are the two single copies."""

import itertools

import pytest
import torch

from megatron_snip.quantizers import (
    Rounding,
    StochasticStream,
    StreamKey,
    quantize_dequantize_operand,
    quantize_dequantize_pair,
    quantize_operand,
    quantize_payload_operand,
    quantize_payload_pair,
)
from megatron_snip.types import Gemm, Operand

STREAM = StochasticStream(StreamKey(0, "decoder.layers.0.mlp.linear_fc1", 1, 0))
ROW = {Operand.INPUT: Gemm.FPROP, Operand.GRAD_OUTPUT: Gemm.DGRAD}


@pytest.mark.parametrize("operand", list(ROW))
@pytest.mark.parametrize(
    "formats", itertools.product(["bf16", "fp8", "fp4", "nvfp4"], repeat=2), ids="-".join
)
def test_a_pair_is_two_single_copies(operand, formats):
    x = torch.randn(3, 50, 96)
    pair = quantize_dequantize_pair(x, formats, operand, stream=STREAM)
    for got, name, gemm in zip(pair, formats, (ROW[operand], Gemm.WGRAD), strict=True):
        wanted = quantize_dequantize_operand(x, name, operand, gemm, stream=STREAM)
        assert got.shape == x.shape and torch.equal(got, wanted)


@pytest.mark.parametrize("operand", list(ROW))
def test_payload_pairs_hold_the_same_numbers_in_the_gemms_layouts(operand):
    x = torch.randn(3, 50, 96, dtype=torch.bfloat16)
    formats = ("fp8", "fp4")
    row, tokens = quantize_payload_pair(x, formats, operand, stream=STREAM)
    for got, name, gemm in zip((row, tokens), formats, (ROW[operand], Gemm.WGRAD), strict=True):
        wanted = quantize_operand(x, name, operand, gemm, stream=STREAM)
        assert torch.equal(got.dequantize(), wanted.dequantize())
        assert torch.equal(got.scales, wanted.scales)
    assert row.codes.is_contiguous() and row.scales.T.is_contiguous()
    assert tokens.codes.T.is_contiguous() and tokens.scales.is_contiguous()


def test_a_single_payload_follows_the_operand():
    x = torch.randn(40, 64)
    args = ("fp4", Operand.GRAD_OUTPUT, Gemm.WGRAD)
    payload = quantize_payload_operand(x, *args, stream=STREAM, transpose=True)
    assert payload.codes.dtype == torch.uint8 and payload.codes.T.is_contiguous()
    wanted = quantize_dequantize_operand(x, *args, stream=STREAM)
    assert torch.equal(payload.dequantize(), wanted)


def test_dtype_and_rounding_are_passed_on():
    x = torch.randn(40, 64)
    pair = quantize_dequantize_pair(
        x,
        ("fp4", "fp4"),
        Operand.GRAD_OUTPUT,
        rounding=Rounding.NEAREST_EVEN,
        dtype=torch.bfloat16,
    )
    wanted = quantize_dequantize_operand(
        x,
        "fp4",
        Operand.GRAD_OUTPUT,
        Gemm.WGRAD,
        rounding=Rounding.NEAREST_EVEN,
        dtype=torch.bfloat16,
    )
    assert pair[1].dtype == torch.bfloat16 and torch.equal(pair[1], wanted)


def test_a_missing_stream_is_refused():
    with pytest.raises(ValueError, match="stream"):
        quantize_dequantize_pair(torch.ones(4, 4), ("fp4", "fp8"), Operand.GRAD_OUTPUT)
