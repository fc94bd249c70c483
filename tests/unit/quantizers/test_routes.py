"""The public functions on the CPU: payloads, their layouts, and what they refuse."""

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import FORMATS
from megatron_snip.kernels import dispatch
from megatron_snip.quantizers import (
    StochasticStream,
    StreamKey,
    StreamLayout,
    quantize,
    quantize_dequantize,
    quantize_dequantize_both,
    quantize_payload,
    quantize_payload_both,
    reference,
)
from megatron_snip.quantizers.codes import encode_e4m3

SCALED = [f for f in FORMATS.values() if f.quantized]
STREAM = StochasticStream(StreamKey(0, "a.layers.0.b", 0, 0))


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
@pytest.mark.parametrize("stream", [None, STREAM], ids=["nearest", "stochastic"])
def test_payloads_hold_every_formats_values_exactly(fmt, stream):
    x = torch.randn(40, 200)
    for block in ((1, fmt.tile), (fmt.tile, 1), fmt.weight_block):
        payload = quantize_payload(x, fmt, block, stream=stream)
        wanted = reference.quantize(x, fmt, block, stream=stream)
        assert torch.equal(payload.codes, encode_e4m3(wanted.values))
        assert torch.equal(payload.scales, wanted.scales)
        assert torch.equal(payload.dequantize(), wanted.dequantize())


def test_layouts_change_strides_and_nothing_else():
    x = torch.randn(130, 70)
    plain = quantize_payload(x, FORMATS["fp8"], (1, 16))
    turned = quantize_payload(x, FORMATS["fp8"], (1, 16), transpose=True, scales_col_major=True)
    assert plain.codes.is_contiguous() and plain.scales.is_contiguous()
    assert turned.codes.T.is_contiguous() and turned.scales.T.is_contiguous()
    assert torch.equal(plain.codes, turned.codes) and torch.equal(plain.scales, turned.scales)


def test_both_is_two_single_calls():
    x, formats, blocks = torch.randn(50, 60), (FORMATS["fp8"], FORMATS["fp4"]), ((1, 32), (32, 1))
    streams = (None, STREAM)
    pair = quantize_dequantize_both(x, formats, blocks, streams=streams)
    payloads = quantize_payload_both(x, formats, blocks, streams=streams)
    for got, payload, fmt, block, stream in zip(
        pair, payloads, formats, blocks, streams, strict=True
    ):
        wanted = quantize_dequantize(x, fmt, block, stream=stream)
        assert torch.equal(got, wanted) and torch.equal(payload.dequantize(), wanted)


def test_the_reference_runs_on_the_cpu():
    x = torch.randn(5, 200)
    with dispatch.forced(dispatch.Path.REFERENCE):
        forced = quantize(x, FORMATS["fp4"], 128)
    assert torch.equal(quantize(x, FORMATS["fp4"], 128).values, forced.values)


def test_forcing_kernels_where_they_cannot_run_is_an_error():
    if dispatch.interpreting():
        pytest.skip("they can run in the interpreter")
    with dispatch.forced(dispatch.Path.TRITON), pytest.raises(UnsupportedError, match="cpu"):
        quantize(torch.ones(2, 2), FORMATS["fp4"], 2)


def test_payloads_are_matrices():
    for function in (quantize_payload, quantize_payload_both, quantize_dequantize_both):
        fmt, block = FORMATS["fp8"], (1, 8)
        if function is not quantize_payload:
            fmt, block = (fmt, fmt), (block, (8, 1))
        with pytest.raises(ValueError, match="matrix"):
            function(torch.ones(2, 3, 4), fmt, block)


def test_two_streams_of_one_tensor_share_a_layout():
    other = StochasticStream(STREAM.key, StreamLayout(row_start=1))
    formats = (FORMATS["fp4"], FORMATS["fp4"])
    for function in (quantize_payload_both, quantize_dequantize_both):
        with pytest.raises(ValueError, match="layout"):
            function(torch.ones(4, 4), formats, ((1, 4), (4, 1)), streams=(STREAM, other))
