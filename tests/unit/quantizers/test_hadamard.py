"""The random Hadamard transform leaves wgrad's product alone and spreads outliers."""

import pytest
import torch

from megatron_snip.quantizers import HadamardTransform


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_the_matrix_is_orthonormal_with_equal_magnitudes(size):
    matrix = HadamardTransform(size, seed=5).matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-6, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5))


@pytest.mark.parametrize("rows", [0, 5, 16, 64, 100])
def test_the_product_is_unchanged(rows):
    torch.manual_seed(0)
    grad, x = torch.randn(rows, 24), torch.randn(rows, 40)
    rotate = HadamardTransform(16, seed=3).apply
    torch.testing.assert_close(rotate(grad).T @ rotate(x), grad.T @ x, atol=1e-4, rtol=1e-4)


def test_a_short_last_run_stays():
    x = torch.randn(20, 8)
    assert torch.equal(HadamardTransform(16).apply(x)[16:], x[16:])


def test_signs_are_replayed_and_depend_on_the_seed():
    a, b = HadamardTransform(64, 1), HadamardTransform(64, 2)
    assert torch.equal(a.signs(), HadamardTransform(64, 1).signs())
    assert not torch.equal(a.signs(), b.signs())
    assert set(a.signs().tolist()) == {-1.0, 1.0}


def test_an_outlier_spreads_over_its_run():
    """The largest magnitude of a run, over its root mean square, falls from 4 towards 1."""
    x = torch.full((16, 1), 0.01)
    x[5] = 100.0
    spread = HadamardTransform(16, 7).apply(x)
    torch.testing.assert_close(spread.norm(), x.norm())
    assert spread.abs().max() / (spread.norm() / 4) < 1.01


def test_sizes_that_are_no_power_of_two_are_refused():
    for size in (0, 12):
        with pytest.raises(ValueError, match="power of two"):
            HadamardTransform(size)
