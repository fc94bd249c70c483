"""Errors of one linear in one format, against NumPy in FP64."""

import numpy as np
import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import HadamardTransform, StochasticStream, StreamKey
from megatron_snip.statistics.measure import (
    Operands,
    exact_output,
    exact_weight_gradient,
    fprop_error,
    squared_norm,
    token_products,
    token_squares,
    wgrad_error,
)
from tests.unit.statistics.equations import Linear, Microbatch, Scales, dequantized
from tests.unit.statistics.equations import dequantized_grad as stochastic

M, K, N = 160, 128, 256


def rotated(a: np.ndarray, size: int) -> np.ndarray:
    """Mix runs of `size` tokens as the format says."""
    return HadamardTransform(size).apply(torch.from_numpy(a)).numpy() if size else a


QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.quantized]


def made(dtype: torch.dtype = torch.float32, tokens: int = M) -> Operands:
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(s, generator=generator) for s in ((tokens, K), (N, K), (tokens, N)))
    return Operands(x.to(dtype), w.to(dtype), (g * 1e-4).to(dtype))


def errors(o: Operands, name: str, stream: StochasticStream) -> dict[str, torch.Tensor]:
    """Both GEMMs' errors."""
    fprop = fprop_error(o, exact_output(o), name)
    wgrad = wgrad_error(o, exact_weight_gradient(o), name, stream)
    return {**vars(fprop), **vars(wgrad)}


def test_exact_products() -> None:
    o = made()
    output, weight_gradient = exact_output(o), exact_weight_gradient(o)
    x, w, g = (t.double() for t in (o.input, o.weight, o.grad_output))
    torch.testing.assert_close(output.double(), x @ w.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight_gradient.double(), g.T @ x, rtol=1e-5, atol=1e-7)
    assert output.dtype == weight_gradient.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANTIZED)
def test_errors_are_those_of_each_gemms_own_operands(name: str, dtype: torch.dtype) -> None:
    o = made(dtype)
    stream = StochasticStream(StreamKey(1, "linear", 2, 3))
    found = errors(o, name, stream)
    x, w, g = (t.float().numpy() for t in (o.input, o.weight, o.grad_output))
    fmt = FORMATS[name]
    block, t = fmt.weight_block, fmt.tile
    linear, scales = Linear("linear", w, w, 1.0), Scales(1, 1.0, 1.0, seed=1, step=2)
    g_r, x_r = (rotated(a, fmt.wgrad_hadamard) for a in (g, x))
    batch = Microbatch(3, x_r, g_r, x_r, g_r, np.arange(0))
    g_w = stochastic(linear, batch, name, "wgrad", (t, 1), scales)
    x_f, x_w = dequantized(x, name, (1, t)), dequantized(x_r, name, (t, 1))
    w_f = dequantized(w, name, block)
    wanted = {
        "output": x_f @ w_f.T - x.astype("f8") @ w.T.astype("f8"),
        "weight_gradient": g_w.T @ x_w - g.T.astype("f8") @ x.astype("f8"),
        "input_square": ((x_f - x) ** 2).sum(),
        "weight_square": ((w_f - w) ** 2).sum(),
        "grad_square": ((g_w - g_r) ** 2).sum(),
    }
    for key, value in wanted.items():
        got = found[key].double().numpy()
        assert np.abs(got - value).max() < 1e-4 * np.abs(value).max(), key


def test_the_operands_are_left_as_they_were() -> None:
    o = made()
    before = [t.clone() for t in vars(o).values()]
    exact = exact_output(o), exact_weight_gradient(o)
    kept = [t.clone() for t in exact]
    fprop_error(o, exact[0], "fp4")
    wgrad_error(o, exact[1], "fp4", StochasticStream(StreamKey(0, "l", 0, 0)))
    for tensor, copy in zip(vars(o).values(), before, strict=True):
        assert torch.equal(tensor, copy)
    assert all(torch.equal(e, k) for e, k in zip(exact, kept, strict=True))


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_linear_without_tokens_has_no_error(name: str) -> None:
    """An expert may be chosen by no token of a microbatch."""
    o = made(tokens=0)
    stream = StochasticStream(StreamKey(0, "l", 0, 0))
    found = errors(o, name, stream)
    assert found["output"].shape == (0, N)
    assert found["weight_gradient"].abs().max() == 0
    assert found["grad_square"] == 0
    assert found["weight_square"] > 0


def test_nan_reaches_the_sums() -> None:
    o = made()
    o.grad_output[5, 5] = float("nan")
    stream = StochasticStream(StreamKey(0, "l", 0, 0))
    found = errors(o, "fp8", stream)
    assert found["grad_square"].isnan()
    assert not found["weight_square"].isnan()


def test_norms_are_fp64_sums_of_squares() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 1e-15]])
    assert token_squares(x).tolist() == pytest.approx([25.0, 1e-30], rel=1e-6, abs=0)
    assert token_squares(x).dtype == torch.float64
    assert squared_norm(x).item() == pytest.approx(25.0)
    assert squared_norm(torch.tensor([3.0, 4.0])).item() == pytest.approx(25.0)
    assert squared_norm(torch.tensor(3.0, dtype=torch.bfloat16)).item() == 9.0
    assert token_squares(torch.full((1, 9), 1e18)).item() == pytest.approx(9e36)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_products_of_tokens_by_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_snip.statistics.measure._PIECE", 3 * N)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, N, generator=generator).to(torch.bfloat16)
    b = torch.randn(rows, N, generator=generator)
    found = token_products(a, b)
    assert (found.shape, found.dtype) == ((rows,), torch.float64)
    torch.testing.assert_close(found, (a.double() * b.double()).sum(1), rtol=0, atol=1e-5)
