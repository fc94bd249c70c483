"""The random Hadamard transform leaves wgrad's product unchanged and spreads outliers."""

from dataclasses import replace

import pytest
import torch
from scipy.linalg import hadamard

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import (
    StochasticStream,
    StreamKey,
    quantize_dequantize_operand,
    rotated,
)
from megatron_snip.types import Gemm, Operand

STREAM = StochasticStream(StreamKey(0, "decoder.layers.0.self_attention.linear_qkv", 1, 0))


def turned(x: torch.Tensor, size: int = 16) -> torch.Tensor:
    return rotated(x, replace(FORMATS["fp4"], wgrad_hadamard=size), Gemm.WGRAD)


@pytest.mark.parametrize("size", [2, 16, 128])
def test_the_matrix_is_hadamard_s_with_signed_columns(size):
    matrix = turned(torch.eye(size), size)
    signs = matrix[0].sign()
    wanted = torch.from_numpy(hadamard(size)).float() * signs * size**-0.5
    torch.testing.assert_close(matrix, wanted)
    assert size < 16 or set(signs.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("rows", [0, 5, 16, 100])
def test_the_product_is_unchanged(rows):
    torch.manual_seed(0)
    grad, x = torch.randn(rows, 24), torch.randn(rows, 40)
    torch.testing.assert_close(turned(grad).T @ turned(x), grad.T @ x, atol=1e-4, rtol=1e-4)
    rest = rows - rows % 16
    assert torch.equal(turned(x)[rest:], x[rest:])


@pytest.mark.parametrize("name", ["fp4", "nvfp4"])
def test_a_rotated_wgrad_is_more_exact_with_outliers(name):
    """In long tiles; in short ones an outlier harms few elements."""
    generator = torch.Generator().manual_seed(3)
    g, x = (torch.randn(1024, n, generator=generator) for n in (48, 64))
    x[torch.randperm(1024, generator=generator)[:60]] *= 20.0
    exact = g.double().t() @ x.double()

    def error(fmt):
        g_q, x_q = (
            quantize_dequantize_operand(
                t, fmt, operand, Gemm.WGRAD, stream=STREAM, dtype=torch.float64
            )
            for t, operand in ((g, Operand.GRAD_OUTPUT), (x, Operand.INPUT))
        )
        return ((g_q.t() @ x_q - exact).norm() / exact.norm()).item()

    plain = FORMATS[name]
    mixed = replace(plain, wgrad_hadamard=16)
    assert error(mixed) < min(0.25, (0.9 if plain.tile == 128 else 1.2) * error(plain))
    for operand in (Operand.INPUT, Operand.WEIGHT):  # other GEMMs do not contract tokens
        a, b = (quantize_dequantize_operand(x, f, operand, Gemm.FPROP) for f in (plain, mixed))
        assert torch.equal(a, b)
