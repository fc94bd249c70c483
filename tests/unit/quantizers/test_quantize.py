"""Quantized matrices and operands: against a NumPy loop over formats, tiles, shapes and NaN.

Rounding is tested value by value, stochastic rounding over every possible draw. The random Hadamard
transform leaves wgrad's product unchanged, and its matrix is SciPy's.
"""

import itertools
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from megatron_snip.formats import E2M0, E2M1, E4M3, E5M2, FORMATS
from megatron_snip.quantizers import reference, stochastic
from megatron_snip.quantizers.quantize import (
    hadamard_matrix,
    is_stochastic,
    operand_block,
    operand_format,
    quantize_dequantize,
    quantize_dequantize_operand,
    quantize_dequantize_pair,
    rotated,
)
from megatron_snip.quantizers.reference import round_in_place, tile_amaxes, tile_scales
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand
from tests.unit.quantizers import oracle
from tests.unit.quantizers.oracle import SCALED

STREAM = StochasticStream(StreamKey(3, "decoder.layers.0.mlp.linear_fc2", 11, 0))
ENTRIES = [(gemm, operand) for gemm, pair in GEMM_OPERANDS.items() for operand in pair]
ROW_GEMM = {Operand.INPUT: Gemm.FPROP, Operand.GRAD_OUTPUT: Gemm.DGRAD}
FP4, FP8, NVFP4 = (FORMATS[name] for name in ("fp4", "fp8", "nvfp4"))

UNCLAMPED = [fmt for fmt in SCALED if not fmt.needs_amax_or_scale]
each_format = pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)


def sample(rows: int, cols: int) -> torch.Tensor:
    """Rows of very different magnitude, a zero tile, zeros of both signs."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-30, 30, (rows, 1)))
    x[: rows // 3, : cols // 2] = 0
    x.flat[:: max(1, x.size // 7)] = -0.0
    return torch.from_numpy(x.astype(np.float32))


def agrees(x: torch.Tensor, fmt, block) -> bool:
    wanted = oracle.quantize_dequantize(x.float().numpy(), fmt, block)
    return oracle.same(quantize_dequantize(x, fmt, block), wanted)


@each_format
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (37, 200), (130, 129), (0, 128), (5, 0)])
def test_results_match_the_loop(fmt, shape):
    for block in ((1, fmt.tile), (fmt.tile, 1), fmt.weight_block):
        assert agrees(sample(*shape), fmt, block)
        assert agrees(sample(*shape).bfloat16(), fmt, block)


@each_format
def test_scales_at_the_edge_of_a_power_of_two(fmt):
    edge = fmt.element.max_value * torch.exp2(torch.arange(-90.0, 100.0))
    above = torch.nextafter(edge, torch.tensor(np.inf))
    for x in (edge, above):
        assert agrees(x[:, None] * torch.linspace(1.0, 0.01, 16), fmt, (1, fmt.tile))


@pytest.mark.parametrize("fmt", UNCLAMPED, ids=lambda f: f.name)
@pytest.mark.parametrize("bits", [-(2**15), 2**15 - 1])
def test_no_draw_lifts_the_largest_magnitude_above_the_largest_value(fmt, bits):
    """Its scaled magnitude can exceed the largest value by the scale's rounding."""
    x = torch.linspace(1.0, 2.0, 20_001)[:, None] * torch.tensor([[1.0, -1.0]])
    _, decode = tile_scales(tile_amaxes(x, (1, 1)), fmt)
    drawn = torch.full(x.shape, bits, dtype=torch.int16)
    out = reference.quantize_dequantize(x, fmt, (1, 1), bits16=drawn)
    assert (out.abs() <= fmt.element.max_value * decode.view(x.shape)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tile_with_nan_or_inf_becomes_nan_and_no_other(bad):
    x = torch.randn(6, 300)
    x[2, 130], x[4, 299] = bad, bad
    wanted = torch.zeros(6, 300, dtype=torch.bool)
    wanted[2, 128:256] = wanted[4, 256:] = True
    for name in ("fp8", "fp4", "mxfp4"):
        assert agrees(x, FORMATS[name], (1, 128))
        out = quantize_dequantize(x, FORMATS[name], (1, 128), stream=STREAM)
        assert torch.equal(out.isnan(), wanted)
    # under a tensor scale it is the entire tensor, unless the amax of finite shards is given
    assert quantize_dequantize(x, NVFP4, (1, 16)).isnan().all()
    given = quantize_dequantize(x, NVFP4, (1, 16), amax_or_scale=torch.tensor(5.0))
    assert given.isnan().sum() == 16 + 12


@each_format
def test_small_tiles_become_zero_and_huge_numbers_stay_finite(fmt):
    x = torch.tensor([[0.0, -0.0, 1e-45, -1e-40] * 64])
    for stream in (None, STREAM):
        out = quantize_dequantize(x, fmt, (1, fmt.tile), stream=stream)
        assert (out == 0).all() and not out.signbit().any()
    top = torch.finfo(torch.float32).max
    out = quantize_dequantize(torch.tensor([[top, -top, 1.0, 0.0] * 40]), fmt, (1, fmt.tile))
    assert not out.isnan().any() and (out[0, :2].abs() >= top * 0.6).all()


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_strides_and_the_shape_of_pieces_do_not_matter(block, monkeypatch):
    base = sample(300, 260)
    for view in (base.T, base[::2, 1:], base[:, ::3], base[:1].expand(50, -1)):
        for stream in (None, STREAM):
            got = quantize_dequantize(view, FP4, block, stream=stream)
            with monkeypatch.context() as patch:
                patch.setattr("megatron_snip.quantizers.reference.PIECE_ELEMENTS", 1000)
                again = quantize_dequantize(view.contiguous(), FP4, block, stream=stream)
            assert torch.equal(got, again)


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
    assert operand_block(FP4, operand, gemm) == fp4
    assert operand_block(FORMATS["mxfp4"], operand, gemm) == mxfp4


@each_format
@pytest.mark.parametrize(("gemm", "operand"), ENTRIES)
def test_operands_are_quantized_in_their_tiles(fmt, gemm, operand):
    x = torch.randn(3, 50, 96, requires_grad=True)
    stream = STREAM.for_gemm(gemm) if is_stochastic(fmt, operand) else None
    source = rotated(x.detach().view(150, 96), fmt, gemm)
    taken = operand_format(fmt, operand)
    wanted = quantize_dequantize(source, taken, operand_block(fmt, operand, gemm), stream=stream)
    got = quantize_dequantize_operand(x, fmt, operand, gemm, stream=STREAM)
    assert torch.equal(got, wanted.view(3, 50, 96)) and not got.requires_grad


@pytest.mark.parametrize("operand", list(ROW_GEMM))
@pytest.mark.parametrize("formats", itertools.product([FORMATS["bf16"], *SCALED], repeat=2))
def test_a_pair_is_two_single_operands(operand, formats):
    for x in (torch.randn(3, 50, 96).bfloat16(), *map(torch.empty, [(0, 0), (0, 64), (2, 3, 0)])):
        pair = quantize_dequantize_pair(x, formats, operand, stream=STREAM, dtype=torch.float32)
        for got, fmt, gemm in zip(pair, formats, (ROW_GEMM[operand], Gemm.WGRAD), strict=True):
            wanted = quantize_dequantize_operand(
                x, fmt, operand, gemm, stream=STREAM, dtype=torch.float32
            )
            assert got.shape == x.shape and torch.equal(got, wanted)


def test_a_pair_draws_once_and_computes_its_amax_once():
    x = torch.randn(50, 96)
    names = "nvfp4", "nvfp4"
    draw = patch.object(stochastic, "random_bits16", wraps=stochastic.random_bits16)
    amax = patch.object(reference, "amax_of", wraps=reference.amax_of)
    with draw as drawn, amax as computed:
        quantize_dequantize_pair(x, names, Operand.GRAD_OUTPUT, stream=STREAM)
    assert (drawn.call_count, computed.call_count) == (1, 1)


def test_bf16_changes_nothing_and_the_dtype_is_the_input_s():
    x = torch.randn(4, 6)
    assert quantize_dequantize_operand(x, "bf16", Operand.INPUT, Gemm.WGRAD) is x
    narrow = quantize_dequantize_operand(x.bfloat16(), "fp8", Operand.INPUT, Gemm.FPROP)
    assert narrow.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_dequantize(x.half(), FP8, (1, 128)), "float32 or bfloat16"),
        (lambda x: quantize_dequantize(x[0], FP8, (1, 128)), "a matrix"),
        (lambda x: quantize_dequantize(x, FORMATS["bf16"], (1, 128)), "not quantized"),
        (lambda x: quantize_dequantize(x, FP8, (0, 128)), "tile"),
        (
            lambda x: quantize_dequantize_operand(x, "fp4", Operand.GRAD_OUTPUT, Gemm.DGRAD),
            "needs a stream",
        ),
        (
            lambda x: quantize_dequantize_operand(x, "fp4", Operand.INPUT, Gemm.DGRAD),
            "does not enter",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(8, 8))


def turned(x: torch.Tensor, size: int = 16) -> torch.Tensor:
    return rotated(x, replace(FP4, wgrad_hadamard=size), Gemm.WGRAD)


@pytest.mark.parametrize("size", [2, 16, 128])
def test_the_matrix_is_hadamard_s_with_signed_columns(size):
    matrix = turned(torch.eye(size), size)
    signs = matrix[0].sign()
    wanted = torch.from_numpy(hadamard(size)).float() * signs * size**-0.5
    assert torch.equal(matrix, wanted.bfloat16().float())  # results are rounded to BF16
    assert size < 16 or set(signs.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("rows", [0, 5, 16, 100])
def test_the_product_is_unchanged(rows):
    torch.manual_seed(0)
    grad, x = torch.randn(rows, 24), torch.randn(rows, 40)
    rest = rows - rows % 16
    assert torch.equal(turned(x)[rest:], x[rest:])
    matrix = hadamard_matrix(16, x.device).double()
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(16).double())
    for tensor in (grad, x):
        runs = tensor[:rest].double().view(-1, 16, tensor.shape[1])
        exact = (matrix @ runs).view(rest, tensor.shape[1])
        torch.testing.assert_close(turned(tensor)[:rest].double(), exact, rtol=2.0**-8, atol=1e-6)
    # Each of the factors is rounded to BF16, by at most 2^-9 of it.
    bound = 2.0**-7 * turned(grad).abs().T @ turned(x).abs() + 1e-4
    assert ((turned(grad).T @ turned(x) - grad.T @ x).abs() <= bound).all()


ALL_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)

each_element = pytest.mark.parametrize("element", [E4M3, E5M2, E2M1, E2M0], ids=lambda e: e.name)


def both_signs(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([values, -values]).astype(np.float32))


def rounded(y: torch.Tensor, element, bits16: torch.Tensor | None = None) -> torch.Tensor:
    q = y.clamp(-element.max_value, element.max_value).contiguous()
    round_in_place(q, element, torch.empty_like(q, dtype=torch.int32), bits16)
    return q


@each_element
def test_grid_values_ties_their_neighbors_and_random_values(element):
    grid = oracle.grid(element)
    ties = (grid[1:] + grid[:-1]) / 2
    up, down = np.nextafter(ties, np.float32(1e9)), np.nextafter(ties, np.float32(0))
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(200_000) * np.exp2(rng.uniform(-16, 9, 200_000))
    y = both_signs(np.concatenate([grid, ties, up, down, drawn]))
    assert oracle.same(rounded(y, element), oracle.round_nearest(y.numpy(), element))


def over_all_draws(y: torch.Tensor, element) -> torch.Tensor:
    shape = (len(y), 2**16)
    return rounded(y[:, None].expand(shape), element, ALL_BITS.expand(shape))


@each_element
def test_stochastic_rounding_is_unbiased_over_all_draws(element):
    """The mean over all 65536 draws is y to 2^-16 of a step, and draws hit neighbors only."""
    values = oracle.grid(element)
    y = both_signs(values)
    assert (over_all_draws(y, element) == y[:, None]).all()  # grid values do not change
    rng = np.random.default_rng(1)
    gaps = rng.integers(0, len(values) - 1, 48)
    lower, upper = values[gaps], values[gaps + 1]
    y = (lower + rng.uniform(0.001, 0.999, 48).astype(np.float32) * (upper - lower)).astype("f4")
    lower, upper = np.tile(lower, 2), np.tile(upper, 2)
    drawn = over_all_draws(both_signs(y), element).numpy()
    magnitude = np.abs(drawn)
    assert ((magnitude == lower[:, None]) | (magnitude == upper[:, None])).all()
    bias = (drawn.astype(np.float64).mean(1) - both_signs(y).numpy()) / (upper - lower)
    assert np.abs(bias).max() <= 2**-16
