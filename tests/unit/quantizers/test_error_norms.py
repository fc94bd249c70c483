"""Sums of squares against FP64 arithmetic."""

import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers.error_norms import error_norms
from megatron_snip.quantizers.quantize import quantize_dequantize

SPECS = ((FORMATS["fp8"], (1, 128)), (FORMATS["fp4"], (128, 1)), (FORMATS["nvfp4"], (1, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (70, 300), (33, 1500)])
def test_norms_are_sums_of_squares(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    errors = [x.double() - quantize_dequantize(x, f, block).double() for f, block in SPECS]
    wanted = torch.stack([t.square().sum() for t in (x.double(), *errors)])
    got = error_norms(x, SPECS)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


def test_nan_empty_and_other_shapes():
    x = torch.randn(4, 256)
    x[2, 3] = float("nan")
    assert error_norms(x, SPECS).isnan().all()
    assert error_norms(torch.empty(0, 128), SPECS).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="matrix"):
        error_norms(torch.ones(2, 3, 4), SPECS)
