"""Functions of the replaced extension that no linear calls, against independent references."""

import pytest
import torch
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
