"""The autograd function on one rank: gradients, bias, main_grad, frozen weights, recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch.utils.checkpoint import checkpoint

from megatron_snip.linears import gemms, native
from megatron_snip.linears.autograd import LinearCall, QuantizedLinear
from megatron_snip.options import Option
from megatron_snip.quantizers import (
    HadamardTransform,
    StochasticStream,
    StreamKey,
    quantize_dequantize_operand,
)
from megatron_snip.types import Gemm, Operand

FP4 = Option.uniform("fp4")
STREAM = StochasticStream(StreamKey(0, "linear", 0, 0))


def call(option: Option = FP4, fuse: bool = False, drawn: list[int] | None = None) -> LinearCall:
    def stream() -> StochasticStream:
        if drawn is not None:
            drawn.append(1)
        return STREAM

    return LinearCall(option, stream, False, False, fuse, None)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 3, 64), (48, 64), (48,), (8, 3, 48))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def run(*args: Any) -> torch.Tensor:
    result: torch.Tensor = QuantizedLinear.apply(*args)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_gemms(dtype: torch.dtype) -> None:
    x, w, b, g = tensors(dtype)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    y = run(x, w, b, call())
    y.backward(g)
    flat_x, flat_g = x.detach().reshape(24, 64), g.reshape(24, 48)
    plain = gemms.fprop(flat_x, w.detach(), FP4).view(8, 3, 48)
    assert torch.equal(y, plain + b)
    assert y.dtype == dtype
    assert x.grad is not None and w.grad is not None and b.grad is not None
    assert torch.equal(x.grad, gemms.dgrad(flat_g, w.detach(), FP4, STREAM).view(8, 3, 64))
    assert torch.equal(w.grad, gemms.wgrad(flat_g, flat_x, FP4, STREAM).to(dtype))
    assert torch.equal(b.grad, flat_g.sum(0))
    assert w.grad.dtype == dtype


def test_random_numbers_are_drawn_once_a_backward() -> None:
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


def test_a_frozen_weight_gets_no_gradient_and_passes_one_on() -> None:
    x, w, _, g = tensors()
    x.requires_grad_()
    run(x, w, None, call()).backward(g)
    assert w.grad is None
    wanted = gemms.dgrad(g.reshape(24, 48), w, FP4, STREAM).view(8, 3, 64)
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("option", ["fp4", "fp4-fp4-bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_gradients_are_added_in_fp32(option: str, dtype: torch.dtype) -> None:
    """Two microbatches into main_grad; autograd gets a dummy that DDP's hook skips."""
    x, w, _, g = tensors(dtype)
    parameter: Any = torch.nn.Parameter(w)
    parameter.main_grad = torch.ones(w.shape)
    parameter.grad_added_to_main_grad = False
    chosen = Option.parse(option)
    for _ in range(2):
        run(x.clone().requires_grad_(), parameter, None, call(chosen, fuse=True)).backward(g)
    one = gemms.wgrad(g.reshape(24, 48), x.reshape(24, 64), chosen, STREAM, fp32_output=True)
    assert torch.equal(parameter.main_grad, 1 + one + one)
    assert parameter.grad_added_to_main_grad is True
    assert parameter.grad is not None  # its hooks must run
    assert parameter.grad.dtype == dtype


def test_dummies_are_zeros_where_they_are_added_all_the_same() -> None:
    """A tied embedding's main_grad gets `.grad` on top of what was added (zero_out_wgrad)."""
    x, w, _, g = tensors()
    parameter: Any = torch.nn.Parameter(w)
    parameter.main_grad = torch.zeros(w.shape)
    parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = False, True
    run(x, parameter, None, call(fuse=True)).backward(g)
    assert parameter.grad is not None
    assert parameter.grad.abs().max() == 0


def test_without_ddp_s_flag_there_is_no_dummy() -> None:
    x, w, _, g = tensors()
    parameter: Any = torch.nn.Parameter(w)
    parameter.main_grad = torch.zeros(w.shape)
    run(x, parameter, None, call(fuse=True)).backward(g)
    assert parameter.grad is None
    assert parameter.main_grad.abs().max() > 0


def test_x_and_w_are_saved_as_they_are() -> None:
    """No quantized or gathered copy waits for the backward."""
    x, w, b, _ = tensors()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), call())
    kept = {t.untyped_storage().data_ptr() for t in saved}
    assert kept <= {t.untyped_storage().data_ptr() for t in (x, w, b)}


def native_call(option: str, fuse: bool = False, grad_enabled: bool = True) -> LinearCall:
    chosen = Option.parse(option)
    runs = frozenset(gemm for gemm in Gemm if chosen[gemm] != "bf16")
    return LinearCall(
        chosen, lambda: STREAM, False, False, fuse, None, runs, grad_enabled=grad_enabled
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "option", ["fp4", "fp8-fp4-fp4", "bf16-fp8-fp4", "fp4-bf16-fp8", "fp8-fp8-bf16"]
)
def test_native_gradients_are_those_of_the_simulated_gemms(option: str, dtype: torch.dtype) -> None:
    x, w, b, g = tensors(dtype)
    results = []
    for runs in (call(Option.parse(option)), native_call(option)):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        y = run(*leaves, runs)
        y.backward(g)
        results.append([y.detach(), *(t.grad for t in leaves)])
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotated_wgrad_beside_native_gemms(dtype: torch.dtype) -> None:
    """No kernel rotates, so of fp4_rht two GEMMs are native and one is simulated."""
    x, w, _, g = tensors(dtype)
    option = Option.uniform("fp4_rht")
    two = LinearCall(
        option, lambda: STREAM, False, False, False, None, frozenset({Gemm.FPROP, Gemm.DGRAD})
    )
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    plain = [t.clone().requires_grad_() for t in (x, w)]
    y, wanted = run(*leaves, None, two), run(*plain, None, native_call("fp4"))
    y.backward(g)
    wanted.backward(g)
    assert torch.equal(y, wanted)
    assert torch.equal(leaves[0].grad, plain[0].grad)  # type: ignore[arg-type]
    mixing = torch.from_numpy(hadamard(16) / 4.0).float() * HadamardTransform(16).signs()
    by_hand = []
    for tensor, operand in ((g, Operand.GRAD_OUTPUT), (x, Operand.INPUT)):
        tokens = tensor.reshape(24, -1).float()
        rotated = torch.cat([mixing @ tokens[:16], tokens[16:]])  # 8 are less than a run
        by_hand.append(
            quantize_dequantize_operand(rotated, "fp4", operand, Gemm.WGRAD, stream=STREAM)
        )
    torch.testing.assert_close(leaves[1].grad, (by_hand[0].t() @ by_hand[1]).to(dtype))
    assert not torch.allclose(leaves[1].grad, plain[1].grad)  # type: ignore[arg-type]


def test_native_gradients_are_added_in_fp32() -> None:
    x, w, _, g = tensors(torch.bfloat16)
    parameter: Any = torch.nn.Parameter(w)
    parameter.main_grad = torch.zeros(w.shape)
    parameter.grad_added_to_main_grad = False
    run(x.requires_grad_(), parameter, None, native_call("fp4", fuse=True)).backward(g)
    wanted = gemms.wgrad(g.reshape(24, 48), x.detach().reshape(24, 64), FP4, STREAM)
    torch.testing.assert_close(parameter.main_grad, wanted, rtol=1e-5, atol=1e-5)
    assert parameter.grad_added_to_main_grad is True


def saved_bytes(call: LinearCall, frozen: bool = False) -> int:
    """What waits for the backward besides the weight, of X [1024, 512] in BF16."""
    x = torch.randn(8, 128, 512).bfloat16().requires_grad_()
    w = torch.randn(256, 512).bfloat16().requires_grad_(not frozen)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x, w, None, call)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for where, size in storages.items() if where != w.untyped_storage().data_ptr())


@pytest.mark.parametrize(
    ("option", "share"),
    [("fp8", 0.5), ("fp4", 0.5), ("bf16-fp8-fp4", 0.5), ("fp8-fp8-bf16", 1.0)],
)
def test_x_waits_for_the_backward_in_one_byte_an_element(option: str, share: float) -> None:
    """And 4 bytes of scale for 128 elements; in BF16 where wgrad runs in BF16."""
    elements = 1024 * 512
    assert saved_bytes(call(Option.parse(option))) == 2 * elements
    scales = 4 * elements // 128 if share < 1 else 0
    assert saved_bytes(native_call(option)) == share * 2 * elements + scales


def test_what_no_backward_needs_is_not_saved() -> None:
    assert saved_bytes(native_call("fp8"), frozen=True) == 0
    assert saved_bytes(call(), frozen=True) == 0


def test_an_evaluation_quantizes_nothing_for_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _, _ = tensors()
    asked: list[bool] = []
    original = native.input_operands

    def watched(*args: Any, fprop: bool, wgrad: bool) -> Any:
        asked.append(wgrad)
        return original(*args, fprop=fprop, wgrad=wgrad)

    monkeypatch.setattr(native, "input_operands", watched)
    with torch.no_grad():
        run(x, w.requires_grad_(), None, native_call("fp8", grad_enabled=False))
    run(x.requires_grad_(), w, None, native_call("fp8"))
    assert asked == [False, True]


WITHOUT_TOKENS = {
    **{name: call(Option.uniform(name)) for name in ("fp8", "fp4", "mxfp8", "mxfp4", "nvfp4")},
    **{f"{name} native": native_call(name) for name in ("fp8", "fp4")},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WITHOUT_TOKENS)
def test_an_expert_without_tokens_has_a_gradient_of_zeros(name: str, dtype: torch.dtype) -> None:
    x, w, _, _ = tensors(dtype)
    x, w = x[:0, 0].contiguous().requires_grad_(), w.requires_grad_()
    y = run(x, w, None, WITHOUT_TOKENS[name])
    assert y.shape == (0, 48)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 64)
    assert w.grad is not None and torch.equal(w.grad, torch.zeros_like(w))
