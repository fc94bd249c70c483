"""Quantized tensors against a plain NumPy loop, over formats, tiles, shapes, strides and NaN."""

import itertools

import numpy as np
import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import (
    StochasticStream,
    StreamKey,
    StreamLayout,
    quantize,
    quantize_dequantize,
)
from tests.unit.quantizers import oracle

SCALED = [f for f in FORMATS.values() if f.quantized]
STREAM = StochasticStream(StreamKey(3, "decoder.layers.0.mlp.linear_fc2", 11, 0))


def sample(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different magnitude, a zero tile, zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-30, 30, (rows, 1)))
    x[: rows // 3, : cols // 2] = 0
    x.flat[:: max(1, x.size // 7)] = -0.0
    return torch.from_numpy(x.astype(np.float32))


def check(x: torch.Tensor, fmt, block) -> None:
    values, decodes, dequantized = oracle.quantize(x.float().numpy(), fmt, block)
    quantized = quantize(x, fmt, block)
    assert oracle.same(quantized.values, values)
    assert oracle.same(quantized.scales, decodes)
    assert oracle.same(quantized.dequantize(), dequantized)
    assert oracle.same(quantize_dequantize(x, fmt, block), dequantized)


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (37, 200), (130, 129)])
def test_values_scales_and_products_match_the_loop(fmt, shape):
    for block in ((1, fmt.tile), (fmt.tile, 1), fmt.weight_block):
        check(sample(*shape), fmt, block)


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
def test_bfloat16_input(fmt):
    check(sample(40, 150).bfloat16(), fmt, (1, fmt.tile))


@pytest.mark.parametrize("name", ["fp8", "fp4", "mxfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tile_with_nan_or_inf_becomes_nan_and_no_other(name, bad):
    fmt, x = FORMATS[name], torch.randn(6, 300)
    x[2, 130], x[4, 299] = bad, bad
    x[2, 131] = 0.0
    check(x, fmt, (1, fmt.tile))
    out = quantize_dequantize(x, fmt, (1, 128), stream=STREAM)
    wanted = torch.zeros(6, 300, dtype=torch.bool)
    wanted[2, 128:256] = wanted[4, 256:] = True
    assert torch.equal(out.isnan(), wanted)


def test_a_tensor_with_nan_becomes_nan_under_a_tensor_scale():
    x = torch.randn(4, 32)
    x[1, 3] = float("inf")
    assert quantize_dequantize(x, FORMATS["nvfp4"], (1, 16)).isnan().all()
    given = quantize_dequantize(x, FORMATS["nvfp4"], (1, 16), tensor_amax=torch.tensor(5.0))
    assert given.isnan().sum() == 16 and given[1, :16].isnan().all()


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
def test_zero_and_vanishing_tiles_become_zero(fmt):
    x = torch.tensor([[0.0, -0.0, 1e-45, -1e-40] * 64])
    for stream in (None, STREAM):
        out = quantize_dequantize(x, fmt, (1, fmt.tile), stream=stream)
        assert (out == 0).all() and not out.signbit().any()


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
def test_huge_numbers_stay_finite(fmt):
    top = torch.finfo(torch.float32).max
    x = torch.tensor([[top, -top, 1.0, 0.0]]).repeat(1, 40)
    out = quantize_dequantize(x, fmt, (1, fmt.tile))
    assert not out.isnan().any()
    assert (out[0, :2].abs() >= top * 0.6).all()


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_strides_do_not_matter(block):
    base = sample(300, 260)
    for view in (base.T, base[::2, 1:], base[:, ::3], base[:1].expand(50, -1)):
        plain = view.contiguous()
        for stream in (None, STREAM):
            got = quantize_dequantize(view, FORMATS["fp4"], block, stream=stream)
            assert torch.equal(
                got, quantize_dequantize(plain, FORMATS["fp4"], block, stream=stream)
            )


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0), (2, 0, 7)])
def test_empty_tensors(shape):
    for fmt, stream in itertools.product(SCALED, (None, STREAM)):
        quantized = quantize(torch.empty(shape), fmt, fmt.tile, stream=stream)
        assert quantized.values.shape == shape == quantized.dequantize().shape
        assert quantized.scales.numel() == 0


def test_leading_dims_are_separate_matrices_but_one_stream():
    x = sample(6 * 40, 96).view(2, 3, 40, 96)
    for fmt, block in ((FORMATS["fp8"], (128, 1)), (FORMATS["fp4"], (1, 128))):
        whole = quantize(x, fmt, block)
        for i, j in itertools.product(range(2), range(3)):
            single = quantize(x[i, j], fmt, block)
            assert torch.equal(whole.values[i, j], single.values)
            assert torch.equal(whole.scales[i, j], single.scales)
        assert torch.equal(whole.dequantize(), quantize_dequantize(x, fmt, block))
    drawn = quantize_dequantize(x, FORMATS["fp4"], (1, 128), stream=STREAM)
    flat = quantize_dequantize(x.view(240, 96), FORMATS["fp4"], (1, 128), stream=STREAM)
    assert torch.equal(drawn.view(240, 96), flat)


def test_one_length_and_dim_name_a_tile():
    x = sample(70, 90)
    for dim, block in ((-1, (1, 32)), (1, (1, 32)), (-2, (32, 1)), (0, (32, 1))):
        a, b = quantize(x, FORMATS["mxfp4"], 32, dim=dim), quantize(x, FORMATS["mxfp4"], block)
        assert a.block == block and torch.equal(a.values, b.values)


def test_directions_are_transposes_of_each_other():
    x = sample(150, 140)
    along_rows = quantize(x, FORMATS["fp8"], 128, dim=-2)
    transposed = quantize(x.T, FORMATS["fp8"], 128)
    assert torch.equal(along_rows.values, transposed.values.T)
    assert torch.equal(along_rows.scales, transposed.scales.T)


@pytest.mark.parametrize("name", ["fp8", "fp4", "fp3"])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200)])
def test_square_blocks_commute_with_the_transpose(name, shape):
    weight = sample(*shape)
    a = quantize_dequantize(weight, FORMATS[name], (128, 128))
    b = quantize_dequantize(weight.T, FORMATS[name], (128, 128))
    assert torch.equal(a.T, b)


def test_bfloat16_output_is_rounded_once_more():
    x = sample(33, 257)
    wide = quantize_dequantize(x, FORMATS["fp8"], (1, 128))
    narrow = quantize_dequantize(x, FORMATS["fp8"], (1, 128), dtype=torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())
    assert torch.equal(quantize(x, FORMATS["fp8"], (1, 128)).dequantize(torch.bfloat16), narrow)


def test_the_tensor_scale_can_come_from_outside():
    x = sample(8, 64)
    amax = x.abs().max()
    whole = quantize(x, FORMATS["nvfp4"], (1, 16))
    half = quantize(x[:, :32], FORMATS["nvfp4"], (1, 16), tensor_amax=amax)
    assert torch.equal(whole.values[:, :32], half.values)
    assert torch.equal(whole.scales[:, :2], half.scales)


@pytest.mark.parametrize("block", [(1, 128), (128, 1)])
def test_stochastic_results_do_not_depend_on_pieces(block, monkeypatch):
    x = torch.randn(300, 264)
    whole = quantize_dequantize(x, FORMATS["fp4"], block, stream=STREAM)
    monkeypatch.setattr("megatron_snip.quantizers.tiling.pieces.__defaults__", (1000,))
    assert torch.equal(quantize_dequantize(x, FORMATS["fp4"], block, stream=STREAM), whole)


@pytest.mark.parametrize("block", [(1, 128), (128, 1)])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_stochastic_shards_make_the_gathered_tensor(block, num_chunks):
    x = torch.randn(130, 512)
    whole = quantize_dequantize(x, FORMATS["fp4"], block, stream=STREAM)
    parts = [chunk.chunk(2, 1) for chunk in x.chunk(num_chunks, 1)]
    for rank in range(2):
        local = torch.cat([chunk[rank] for chunk in parts], 1)
        layout = StreamLayout.shard(256, rank, 2, num_chunks)
        got = quantize_dequantize(
            local, FORMATS["fp4"], block, stream=StochasticStream(STREAM.key, layout)
        )
        wanted = [chunk.chunk(2, 1)[rank] for chunk in whole.chunk(num_chunks, 1)]
        assert torch.equal(got, torch.cat(wanted, 1))


@pytest.mark.parametrize("name", ["fp4", "fp8", "mxfp4", "fp3"])
def test_stochastic_rounding_is_unbiased_over_the_whole_range(name):
    """Over 1.3e6 draws of the real stream, each of 64 values averages to itself within 4.5 sigma.

    The value at column 0 fixes the scale; the others cover (-max, max) with |y| < 1 included.
    """
    fmt, rows = FORMATS[name], 20_000
    top = fmt.element.max_value
    y = torch.linspace(-1, 1, 64).sign() * torch.linspace(-1, 1, 64).abs() ** 2 * top
    y[0] = top
    scale = 0.37 if fmt.scale.value == "fp32" else 0.5
    x = (y * scale).expand(rows, 64)
    out = quantize_dequantize(x, fmt, (1, 64), stream=STREAM).double() / scale
    bias = out.mean(0) - y.double()
    sigma = out.std(0) / rows**0.5
    assert (bias.abs() <= 4.5 * sigma + 2e-6 * top).all()
    assert (out.std(0)[1:-1] > 0).float().mean() > 0.8  # it did round


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize(x.half(), FORMATS["fp8"], 128), "float32 or bfloat16"),
        (lambda x: quantize(x[0], FORMATS["fp8"], 128), "rows, cols"),
        (lambda x: quantize(x, FORMATS["bf16"], 128), "not quantized"),
        (lambda x: quantize(x, FORMATS["fp8"], 128, dim=-3), "dim"),
        (lambda x: quantize(x, FORMATS["fp8"], (0, 128)), "tile"),
        (
            lambda x: quantize(
                x, FORMATS["fp8"], 128, stream=StochasticStream(STREAM.key, StreamLayout(4))
            ),
            "column",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(8, 8))


def test_no_gradient_is_recorded():
    x = torch.randn(4, 4, requires_grad=True)
    assert not quantize_dequantize(x, FORMATS["fp8"], 128).requires_grad
