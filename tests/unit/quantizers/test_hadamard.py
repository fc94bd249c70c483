"""The random Hadamard transform leaves wgrad's product unchanged and spreads outliers."""

from dataclasses import replace

import pytest
import torch
from scipy.linalg import hadamard

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers.quantize import rotated
from megatron_snip.types import Gemm


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
