"""The autograd function on one rank: gradients, bias, main_grad, frozen weights, recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch.utils.checkpoint import checkpoint

from megatron_snip import formats
from megatron_snip.linears import simulated_gemm
from megatron_snip.linears.autograd import LinearCall, QuantizedLinear
from megatron_snip.matmul import matmul_fp32
from megatron_snip.options import Option
from megatron_snip.quantizers import StochasticStream, StreamKey, quantize_dequantize_operand
from megatron_snip.quantizers.hadamard import hadamard_matrix
from megatron_snip.types import Gemm, Operand

STREAM = StochasticStream(StreamKey(0, "linear", 0, 0))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def call(option: str = "fp4", fuse: bool = False, drawn: list[int] | None = None) -> LinearCall:
    def stream() -> StochasticStream:
        if drawn is not None:
            drawn.append(1)
        return STREAM

    return LinearCall(Option.parse(option), stream, False, False, fuse, None)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 3, 64), (48, 64), (48,), (8, 3, 48))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def run(*args: Any) -> torch.Tensor:
    result: torch.Tensor = QuantizedLinear.apply(*args)  # type: ignore[no-untyped-call]
    return result


def quantized(tensor: torch.Tensor, name: str, operand: Operand, gemm: Gemm) -> torch.Tensor:
    """What a GEMM multiplies, [rows, cols] FP32."""
    rows = tensor.detach().flatten(0, -2)
    return quantize_dequantize_operand(
        rows, name, operand, gemm, stream=STREAM, dtype=torch.float32
    )


@DTYPES
@pytest.mark.parametrize("option", ["fp4", "fp8", "nvfp4", "fp8-fp4-mxfp4", "bf16-fp8-bf16"])
def test_gradients_are_plain_pytorch_on_quantized_operands(option: str, dtype: torch.dtype) -> None:
    x, w, b, g = tensors(dtype)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = run(*leaves, call(option))
    y.backward(g)
    fprop, dgrad, wgrad = Option.parse(option).formats
    exact = torch.float32 if dtype == torch.float32 else torch.float64
    i, o, k = Operand.INPUT, Operand.GRAD_OUTPUT, Operand.WEIGHT
    wanted = [
        (quantized(x, fprop, i, Gemm.FPROP), quantized(w, fprop, k, Gemm.FPROP).t()),
        (quantized(g, dgrad, o, Gemm.DGRAD), quantized(w, dgrad, k, Gemm.DGRAD)),
        (quantized(g, wgrad, o, Gemm.WGRAD).t(), quantized(x, wgrad, i, Gemm.WGRAD)),
    ]
    found = [y.detach() - b, leaves[0].grad, leaves[1].grad, leaves[2].grad]
    products = [(left.to(exact) @ right.to(exact)).to(dtype) for left, right in wanted]
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
    for ours, truth in zip(found, [*products, g.flatten(0, 1).sum(0)], strict=True):
        assert ours is not None and ours.dtype == dtype
        torch.testing.assert_close(
            ours.reshape(truth.shape), truth, rtol=tolerance, atol=10 * tolerance
        )


def test_random_numbers_are_drawn_once_per_backward() -> None:
    x, w, _, g = tensors()
    drawn: list[int] = []
    y = run(x.requires_grad_(), w.requires_grad_(), None, call(drawn=drawn))
    assert drawn == []
    y.backward(g)
    assert drawn == [1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_the_forward_changes_nothing(reentrant: bool) -> None:
    grads = []
    for recompute in (False, True):
        x, w, _, g = tensors()
        x, w = x.requires_grad_(), w.requires_grad_()
        drawn: list[int] = []
        arguments = (x, w, None, call(drawn=drawn))
        y = checkpoint(run, *arguments, use_reentrant=reentrant) if recompute else run(*arguments)
        y.backward(g)
        assert drawn == [1]
        grads.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_frozen_weight_gets_no_gradient_and_the_input_gets_one() -> None:
    grads = []
    for frozen in (False, True):
        x, w, _, g = tensors()
        x.requires_grad_()
        w.requires_grad_(not frozen)
        run(x, w, None, call()).backward(g)
        assert (w.grad is None) == frozen
        grads.append(x.grad)
    assert torch.equal(*grads)


@DTYPES
@pytest.mark.parametrize("option", ["fp4", "fp4-fp4-bf16"])
@pytest.mark.parametrize("flagged", [True, False])
def test_fused_gradients_are_added_in_fp32(option: str, flagged: bool, dtype: torch.dtype) -> None:
    """Two microbatches into main_grad. Autograd gets a dummy that DDP's hook skips, if DDP asks."""
    x, w, _, g = tensors(dtype)
    parameter: Any = torch.nn.Parameter(w)
    parameter.main_grad = torch.ones(w.shape)
    if flagged:
        parameter.grad_added_to_main_grad = False
    for _ in range(2):
        run(x.clone().requires_grad_(), parameter, None, call(option, fuse=True)).backward(g)
    name = Option.parse(option).wgrad
    one = matmul_fp32(
        quantized(g, name, Operand.GRAD_OUTPUT, Gemm.WGRAD).t(),
        quantized(x, name, Operand.INPUT, Gemm.WGRAD),
    )
    assert torch.equal(parameter.main_grad, 1 + one + one)
    if not flagged:
        assert parameter.grad is None
        return
    assert parameter.grad_added_to_main_grad is True
    assert parameter.grad is not None and parameter.grad.dtype == dtype  # its hooks must run


def test_the_dummy_is_zero_where_it_is_added() -> None:
    """A tied embedding's main_grad gets `.grad` on top of what was added (zero_out_wgrad)."""
    x, w, _, g = tensors()
    parameter: Any = torch.nn.Parameter(w)
    parameter.main_grad = torch.zeros(w.shape)
    parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = False, True
    run(x, parameter, None, call(fuse=True)).backward(g)
    assert parameter.grad is not None and parameter.grad.abs().max() == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_the_backward_saves_x_and_w_and_no_copy(frozen: bool) -> None:
    x, w, b, _ = tensors()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x.requires_grad_(), w.requires_grad_(not frozen), b.requires_grad_(), call())
    expected = {t.untyped_storage().data_ptr() for t in ((w,) if frozen else (x, w))}
    assert {t.untyped_storage().data_ptr() for t in saved} == expected


@DTYPES
def test_a_hadamard_transform_changes_wgrad_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotating = replace(formats.FORMATS["fp4"], name="rotating", wgrad_hadamard=16)
    monkeypatch.setitem(formats.FORMATS, "rotating", rotating)
    x, w, _, g = tensors(dtype)
    results = []
    for name in ("fp4", "rotating"):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = run(*leaves, None, call(name))
        y.backward(g)
        results.append((y.detach(), leaves[0].grad, leaves[1].grad))
    plain, rotated = results
    assert torch.equal(plain[0], rotated[0]) and torch.equal(plain[1], rotated[1])
    signs = hadamard_matrix(16, torch.device("cpu"))[0] * 4.0
    mixing = torch.from_numpy(hadamard(16) / 4.0).float() * signs
    operands = []
    for tensor, operand in ((g, Operand.GRAD_OUTPUT), (x, Operand.INPUT)):
        tokens = tensor.flatten(0, 1).float()
        turned = torch.cat([mixing @ tokens[:16], tokens[16:]])  # 8 tokens are less than a run
        operands.append(quantized(turned, "fp4", operand, Gemm.WGRAD))
    torch.testing.assert_close(rotated[2], (operands[0].t() @ operands[1]).to(dtype))
    assert not torch.allclose(rotated[2], plain[2])


@DTYPES
@pytest.mark.parametrize("name", ["fp8", "fp4", "mxfp8", "mxfp4", "nvfp4"])
def test_an_expert_without_tokens_has_a_zero_gradient(name: str, dtype: torch.dtype) -> None:
    x, w, _, _ = tensors(dtype)
    x, w = x[:0, 0].contiguous().requires_grad_(), w.requires_grad_()
    y = run(x, w, None, call(name))
    assert y.shape == (0, 48)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 64)
    assert w.grad is not None and torch.equal(w.grad, torch.zeros_like(w))


@DTYPES
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    """Bitwise: the FP32 product of the quantized operands, cast to the output's dtype."""
    x, w, _, g = tensors(dtype)
    x, g = x.flatten(0, 1), g.flatten(0, 1)
    option = Option.uniform("fp4")
    i, o, k = Operand.INPUT, Operand.GRAD_OUTPUT, Operand.WEIGHT
    y = matmul_fp32(quantized(x, "fp4", i, Gemm.FPROP), quantized(w, "fp4", k, Gemm.FPROP).t())
    assert torch.equal(simulated_gemm.fprop(x, w, option), y.to(dtype))
    g_row, g_col = simulated_gemm.quantize_grad_output(g, option, STREAM, 64)
    assert g_row is not None and g_col is not None
    dx = matmul_fp32(quantized(g, "fp4", o, Gemm.DGRAD), quantized(w, "fp4", k, Gemm.DGRAD))
    assert torch.equal(simulated_gemm.dgrad(g_row, w, option, dtype), dx.to(dtype))
    dw = matmul_fp32(quantized(g, "fp4", o, Gemm.WGRAD).t(), quantized(x, "fp4", i, Gemm.WGRAD))
    assert torch.equal(simulated_gemm.wgrad(g_col, x, option), dw)  # FP32, as main_grad adds it


def test_bf16_gemms_are_the_plain_ones() -> None:
    x, w, _, g = tensors(torch.bfloat16)
    x, g = x.flatten(0, 1), g.flatten(0, 1)
    bf16 = Option.uniform("bf16")
    assert torch.equal(simulated_gemm.fprop(x, w, bf16), torch.matmul(x, w.t()))
    assert torch.equal(simulated_gemm.dgrad(g, w, bf16, g.dtype), g.matmul(w))
    assert torch.equal(simulated_gemm.wgrad(g, x, bf16), g.t().matmul(x))
    exact = simulated_gemm.wgrad(g, x, bf16, fp32_output=True)
    assert exact.dtype == torch.float32
    torch.testing.assert_close(exact.double(), g.double().t() @ x.double(), rtol=1e-5, atol=1e-4)
