"""Transformer Engine's linears on the replaced extension, against torch and dequantized GEMMs."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe

from megatron_snip.linears.te import quantizers
from tests.te_on_cpu import capability, probe

HYBRID = {"fp8_format": recipe.Format.HYBRID}
RECIPES = {
    "tensorwise": recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3),
    "tensorwise hybrid": recipe.Float8CurrentScaling(**HYBRID),
    "delayed": recipe.DelayedScaling(**HYBRID),
    "blockwise": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
GROUPED = {
    **RECIPES,
    "per GEMM": recipe.CustomRecipe(qfactory=quantizers.nvfp4_mxfp8_bf16),
}


def step(module: Any, x: torch.Tensor, using: Any = None, **kwargs: Any) -> Any:
    x = x.clone().requires_grad_()
    with te.fp8_autocast(enabled=using is not None, fp8_recipe=using):
        y = module(x, **kwargs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    y.backward(grad)
    return x, y, grad


def test_fp32_is_torch() -> None:
    torch.manual_seed(0)
    module = te.LayerNormLinear(96, 64, params_dtype=torch.float32)
    x, y, grad = step(module, torch.randn(32, 96))
    other = x.detach().clone().requires_grad_()
    normal = torch.nn.functional.layer_norm(
        other, (96,), module.layer_norm_weight, module.layer_norm_bias, module.eps
    )
    wanted = torch.nn.functional.linear(normal, module.weight, module.bias)
    found = [module.weight.grad, module.bias.grad, module.layer_norm_weight.grad]
    names = (other, module.weight, module.bias, module.layer_norm_weight)
    dx, *gradients = torch.autograd.grad(wanted, names, grad)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_gemms_multiply_what_was_quantized(gpu: ExitStack, name: str, hopper: bool) -> None:
    """In the recipe's format; the results are the products of the operands' values."""
    if hopper and name in ("mxfp8", "nvfp4"):
        pytest.skip("needs Blackwell")
    if hopper:
        gpu.enter_context(capability.on((9, 0)))
    torch.manual_seed(0)
    module = te.Linear(128, 96, bias=False, params_dtype=torch.bfloat16)
    with probe.gemms() as found:
        x, y, _ = step(module, torch.randn(64, 128).bfloat16(), RECIPES[name])
    word = name.removesuffix(" hybrid")
    assert module.seen == [(word,) * 3]
    fprop, dgrad, wgrad = found
    products = {
        "y": fprop.second @ fprop.first.t(),
        "dx": dgrad.second @ dgrad.first,
        "dw": wgrad.second.t() @ wgrad.first,
    }
    results = {"y": y, "dx": x.grad, "dw": module.weight.grad}
    for key, product in products.items():
        torch.testing.assert_close(results[key], product.bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8", "nvfp4", "per GEMM"])
def test_grouped_experts_are_linears(name: str) -> None:
    """Bit by bit, an expert without tokens included."""
    torch.manual_seed(0)
    sizes = [64, 0, 32]
    grouped = te.GroupedLinear(3, 128, 64, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(96, 128).bfloat16()
    found, y, grad = step(grouped, x, GROUPED[name], m_splits=sizes)
    pieces = zip(
        x.split(sizes), y.split(sizes), grad.split(sizes), found.grad.split(sizes), strict=True
    )
    for i, (piece, out, gradient, dx) in enumerate(pieces):
        weight = getattr(grouped, f"weight{i}")
        if not len(piece):
            assert not weight.grad.any()
            continue
        linear = te.Linear(128, 64, bias=False, params_dtype=torch.bfloat16)
        with torch.no_grad():
            linear.weight.copy_(weight)
        own = piece.clone().requires_grad_()
        with te.fp8_autocast(enabled=True, fp8_recipe=GROUPED[name]):
            alone = linear(own)
        alone.backward(gradient)
        if name != "nvfp4":  # which rounds gradients stochastically
            assert torch.equal(own.grad, dx) and torch.equal(linear.weight.grad, weight.grad)
        assert torch.equal(alone, out)


def test_what_is_not_here_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.fused_rope_forward"):
        tex.fused_rope_forward(None, None)
    with pytest.raises(AttributeError):
        tex.no_such_name  # noqa: B018


def test_fused_operations_with_a_bias_are_torch() -> None:
    """Their parameters are made on `torch.device("cuda", torch.cuda.current_device())`."""
    torch.manual_seed(0)
    module = te.ops.Sequential(te.ops.Linear(32, 64, bias=True), te.ops.Linear(64, 32, bias=True))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x, y, grad = step(module, torch.randn(16, 32))
    other = x.detach().clone().requires_grad_()
    hidden = torch.nn.functional.linear(other, module[0].weight, module[0].bias)
    wanted = torch.nn.functional.linear(hidden, module[1].weight, module[1].bias)
    torch.testing.assert_close(y, wanted)
    (dx, dbias) = torch.autograd.grad(wanted, (other, module[0].bias), grad)
    torch.testing.assert_close(x.grad, dx, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(module[0].bias.grad, dbias, rtol=1e-4, atol=1e-3)
