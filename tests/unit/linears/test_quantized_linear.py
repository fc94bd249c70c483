"""The autograd function on one rank: gradients, bias, main_grad, frozen weights, recompute."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_snip.linears import quantized_linear as gemms
from megatron_snip.linears.quantized_linear import LinearCall
from megatron_snip.linears.quantized_linear import quantized_linear as run
from megatron_snip.matmul import matmul_fp32
from megatron_snip.options import Option
from megatron_snip.quantizers.quantize import quantize_dequantize_operand
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.types import Gemm, Operand

STREAM = StochasticStream(StreamKey(0, "linear", 0, 0))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def call(
    option: str = "fp4",
    fuse: bool = False,
    drawn: list[int] | None = None,
    saves_input: bool = False,
) -> LinearCall:
    def stream() -> StochasticStream:
        if drawn is not None:
            drawn.append(1)
        return STREAM

    return LinearCall(Option.parse(option), stream, fuse_wgrad=fuse, saves_input=saves_input)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 3, 64), (48, 64), (48,), (8, 3, 48))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def quantized(tensor: torch.Tensor, name: str, operand: Operand, gemm: Gemm) -> torch.Tensor:
    """What a GEMM multiplies, [rows, cols] FP32."""
    rows = tensor.detach().flatten(0, -2)
    return quantize_dequantize_operand(
        rows, name, operand, gemm, stream=STREAM, dtype=torch.float32
    )


def product(name: str, gemm: Gemm, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A GEMM by its formula: Y = X W^T, dX = G W, dW = G^T X."""
    dtype, operands = left.dtype, [left, right]
    if name != "bf16":
        roles = {
            Gemm.FPROP: (Operand.INPUT, Operand.WEIGHT),
            Gemm.DGRAD: (Operand.GRAD_OUTPUT, Operand.WEIGHT),
            Gemm.WGRAD: (Operand.GRAD_OUTPUT, Operand.INPUT),
        }[gemm]
        operands = [quantized(t, name, r, gemm) for t, r in zip(operands, roles, strict=True)]
    a, b = operands
    a, b = (a.t() if gemm is Gemm.WGRAD else a), (b.t() if gemm is Gemm.FPROP else b)
    return a.matmul(b) if name == "bf16" else matmul_fp32(a, b).to(dtype)


@DTYPES
@pytest.mark.parametrize("option", ["fp4", "fp8", "nvfp4", "fp8-fp4-mxfp4", "bf16-fp8-bf16"])
def test_results_are_products_of_quantized_operands_rounded_once(
    option: str, dtype: torch.dtype
) -> None:
    """Bitwise; bf16 GEMMs are the plain ones."""
    x, w, b, g = tensors(dtype)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = run(*leaves, call(option))
    y.backward(g)
    x, g = x.flatten(0, 1), g.flatten(0, 1)
    fprop, dgrad, wgrad = Option.parse(option).formats
    wanted = [
        product(fprop, Gemm.FPROP, x, w) + b,
        product(dgrad, Gemm.DGRAD, g, w),
        product(wgrad, Gemm.WGRAD, g, x),
        g.sum(0),
    ]
    found = [y.detach(), *(leaf.grad for leaf in leaves)]
    for ours, truth in zip(found, wanted, strict=True):
        assert ours is not None and ours.dtype == dtype
        assert torch.equal(ours.reshape(truth.shape), truth)


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


@DTYPES
@pytest.mark.parametrize("option", ["fp4", "fp4-fp4-bf16"])
@pytest.mark.parametrize("flags", [(), ("added",), ("added", "zero_out_wgrad")])
def test_fused_gradients_are_added_in_fp32(
    option: str, flags: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Two microbatches into main_grad. Autograd gets a dummy that DDP's hook skips, if DDP asks.

    It is zero where it is added: a tied embedding's main_grad gets `.grad` on top.
    """
    x, w, _, g = tensors(dtype)
    parameter: Any = torch.nn.Parameter(w)
    parameter.main_grad = torch.ones(w.shape)
    if flags:
        parameter.grad_added_to_main_grad = False
        parameter.zero_out_wgrad = "zero_out_wgrad" in flags
    for _ in range(2):
        run(x.clone().requires_grad_(), parameter, None, call(option, fuse=True)).backward(g)
    name = Option.parse(option).wgrad
    one = matmul_fp32(
        quantized(g, name, Operand.GRAD_OUTPUT, Gemm.WGRAD).t(),
        quantized(x, name, Operand.INPUT, Gemm.WGRAD),
    )
    assert torch.equal(parameter.main_grad, 1 + one + one)
    if not flags:
        assert parameter.grad is None
        return
    assert parameter.grad_added_to_main_grad is True
    assert parameter.grad is not None and parameter.grad.dtype == dtype  # its hooks must run
    assert not parameter.zero_out_wgrad or parameter.grad.abs().max() == 0


@pytest.mark.parametrize("option", ["fp4", "fp8-fp8-bf16"])
@pytest.mark.parametrize(
    ("dtype", "saves_input"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_forward_saves_w_and_what_wgrad_needs_of_x(
    frozen: bool, dtype: torch.dtype, saves_input: bool, option: str
) -> None:
    """X quantized for wgrad, or X where it must be saved or the other is larger; no other copy."""
    x, w, b, _ = tensors(dtype)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(
            x.requires_grad_(),
            w.requires_grad_(not frozen),
            b,
            call(option, saves_input=saves_input),
        )
    assert saved[0].data_ptr() == w.data_ptr() and len(saved) == (1 if frozen else 2)
    if frozen:
        return
    if saves_input or dtype == torch.bfloat16 or option.endswith("bf16"):
        assert saved[1].data_ptr() == x.data_ptr()
    else:
        wanted = quantized(x, "fp4", Operand.INPUT, Gemm.WGRAD)
        assert saved[1].dtype == dtype and torch.equal(saved[1].flatten(0, -2), wanted)


def test_a_forward_without_a_backward_quantizes_for_fprop_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w, _, _ = tensors()
    wanted = run(x, w.requires_grad_(), None, call())
    monkeypatch.setattr(gemms, "quantize_dequantize_pair", None)
    with torch.no_grad():
        assert torch.equal(run(x, w, None, call()), wanted)


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
