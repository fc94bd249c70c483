"""Sums of squares against FP64 arithmetic."""

import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import error_norms, moments, quantize_dequantize

SPECS = ((FORMATS["fp8"], (1, 128)), (FORMATS["fp4"], (128, 1)), (FORMATS["nvfp4"], (1, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (70, 300), (33, 1500)])
def test_norms_are_sums_of_squares(dtype, shape):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    wide = x.double()
    wanted = [wide.square()]
    for fmt, block in SPECS:
        wanted.append((wide - quantize_dequantize(x, fmt, block).double()).square())
    rows = torch.stack([square.sum(1) for square in wanted])
    got = error_norms(x, SPECS, rowwise=True)
    assert got.dtype == torch.float64 and got.shape == (4, shape[0])
    torch.testing.assert_close(got, rows, rtol=1e-6, atol=0)
    torch.testing.assert_close(error_norms(x, SPECS), rows.sum(1), rtol=1e-6, atol=0)


def test_large_magnitudes_and_nan_show():
    x = torch.randn(4, 256)
    x[2, 3] = float("nan")
    got = error_norms(x, SPECS[:1], rowwise=True)
    assert got.isnan().any(0).tolist() == [False, False, True, False]


def test_norms_add_over_shards_whose_tiles_stay_whole():
    x = torch.randn(20, 512)
    spec = SPECS[:1]
    parts = error_norms(x[:, :256], spec) + error_norms(x[:, 256:], spec)
    torch.testing.assert_close(parts, error_norms(x, spec), rtol=1e-6, atol=0)


def test_moments():
    x = torch.randn(33, 700).bfloat16()
    amax, square = moments(x)
    assert amax.dtype == torch.float32 and amax == x.float().abs().max()
    torch.testing.assert_close(square, x.double().square().sum(), rtol=1e-7, atol=0)
    x[1, 1] = float("nan")
    assert moments(x)[0].isnan()


def test_empty():
    x = torch.empty(0, 128)
    assert error_norms(x, SPECS).tolist() == [0, 0, 0, 0]
    assert error_norms(x, SPECS, rowwise=True).shape == (4, 0)
    assert [float(m) for m in moments(x)] == [0, 0]


def test_only_matrices():
    with pytest.raises(ValueError, match="matrix"):
        error_norms(torch.ones(2, 3, 4), SPECS)
