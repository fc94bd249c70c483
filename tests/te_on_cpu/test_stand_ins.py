"""Functions of the replaced extension that no linear calls, against independent references."""

import pytest
import torch
import transformer_engine.common.recipe as te_recipes
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops.basic.grouped_linear as grouped_linear_module
import transformer_engine_torch as tex
from torch import Tensor

F64 = torch.float64


def blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Gate and linear part, column by column."""
    width = x.shape[-1] // 2
    size = size or width
    gates = [2 * size * (i // size) + i % size for i in range(width)]
    return x[..., gates], x[..., [i + size for i in gates]]


@pytest.mark.parametrize("interleave", [0, 8])
def test_scaled_swiglu_and_its_gradients(interleave: int) -> None:
    """Against FP64; BF16 rounds once, to 2^-8."""
    torch.manual_seed(0)
    x, scales = torch.randn(6, 64).bfloat16(), torch.rand(6).bfloat16()
    grad = torch.randn(6, 32).bfloat16()
    other, rows = x.to(F64).requires_grad_(), scales.to(F64).requires_grad_()
    gate, linear = blocks(other, interleave)
    wanted = gate / (1 + (-gate).exp()) * linear * rows[:, None]
    wanted.backward(grad.to(F64))
    y = tex.scaled_swiglu(x, scales, None, interleave)
    dx, dscales = tex.scaled_dswiglu(grad, x, scales, None, interleave, True)
    found = [(y, wanted), (dx, other.grad), (dscales, rows.grad)]
    for value, exact in found:
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.to(F64), exact.detach(), rtol=2**-8, atol=1e-5)
    assert tex.scaled_dswiglu(grad, x, scales, None, interleave, False)[1] is None


RECIPES = {"bf16": None, "mxfp8": "MXFP8BlockScaling", "fp8": "Float8CurrentScaling"}
SIZES = [64, 0, 160]
"""Tokens of three experts."""


def grouped_linear(recipe: str | None, is_grouped: bool) -> list[Tensor]:
    """Y, dX and dW of an operation, with the operands of all experts in one tensor or not."""
    torch.manual_seed(3)
    op = te.ops.GroupedLinear(3, 64, 96, bias=False, device="cpu", dtype=torch.bfloat16)
    x = torch.randn(sum(SIZES), 64).bfloat16().requires_grad_()
    grad = torch.randn(sum(SIZES), 96).bfloat16()
    made = None if recipe is None else getattr(te_recipes, recipe)()
    with pytest.MonkeyPatch.context() as patch:
        name = "is_op_fuser_grouped_tensor_path_supported"
        patch.setattr(grouped_linear_module, name, lambda *_: is_grouped)
        with te.autocast(enabled=made is not None, recipe=made):
            y = op(x, torch.tensor(SIZES))
        y.backward(grad)
    grads = [weight.grad for weight in op.parameters()]
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_in_one_tensor_are_experts_in_tensors_of_their_own(recipe: str) -> None:
    found = grouped_linear(RECIPES[recipe], is_grouped=True)
    wanted = grouped_linear(RECIPES[recipe], is_grouped=False)
    assert len(found) == 5
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_adam_on_halves_of_master_weights_is_adam_on_master_weights() -> None:
    """Bit by bit; the parameter is its master weight, rounded to the nearest BF16."""
    torch.manual_seed(0)
    master = torch.randn(1000)
    bits = master.view(torch.int32)
    remainder = (bits & 0xFFFF).to(torch.int16)
    parameter = ((bits >> 16) + (remainder < 0)).to(torch.int16).view(torch.bfloat16)
    moments, others = ([torch.zeros(1000), torch.zeros(1000)] for _ in range(2))
    rounded = torch.zeros(1000, dtype=torch.bfloat16)
    for step in range(1, 6):
        gradient = torch.randn(1000)
        settings = 1e-2, 0.9, 0.95, 1e-8, step, 1, 1, 0.1
        lists = [[gradient], [parameter], *([each] for each in moments), [remainder]]
        tex.multi_tensor_adam_param_remainder(2048, torch.zeros(1), lists, *settings)
        lists = [[gradient], [rounded], *([each] for each in others), [master]]
        tex.multi_tensor_adam(2048, torch.zeros(1), lists, *settings)
        upper = (parameter.view(torch.int16).int() - (remainder < 0).int()) << 16
        joined = (upper | (remainder.int() & 0xFFFF)).view(torch.float32)
        assert torch.equal(joined, master)
        off = (parameter.double() - master.double()).abs()
        nearest = (rounded.double() - master.double()).abs()
        assert torch.equal(off, nearest)  # of two that are as near, either
    weight = torch.nn.Parameter(torch.ones(4))
    adam = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    weight.grad = torch.arange(4.0)
    adam.step()
    lists = [[torch.arange(4.0)], [torch.ones(4).bfloat16()], [torch.zeros(4)], [torch.zeros(4)]]
    low = torch.zeros(4, dtype=torch.int16)
    tex.multi_tensor_adam_param_remainder(
        2048, torch.zeros(1), [*lists, [low]], 1e-2, 0.9, 0.95, 1e-8, 1, 1, 1, 0.1
    )
    upper = (lists[1][0].view(torch.int16).int() - (low < 0).int()) << 16
    joined = (upper | (low.int() & 0xFFFF)).view(torch.float32)
    torch.testing.assert_close(joined, weight.detach(), rtol=1e-6, atol=0)
