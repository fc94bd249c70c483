"""Measuring passes run no wgrad: the same output and dgrad, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_snip.linears.measured import without_wgrad
from tests.unit.linears.conftest import MakeModel


def call(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn((5, 64), generator=generator).requires_grad_(),
        "weight": torch.nn.Parameter(torch.randn((48, 64), generator=generator)),
        "bias": torch.nn.Parameter(torch.randn(48, generator=generator)),
        **changes,
    }


def plain(input: Any, weight: Any, bias: Any, **_: Any) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight, bias)


def test_only_the_input_gets_a_gradient() -> None:
    kwargs, grad = call(), torch.randn(5, 48)
    output = without_wgrad(plain, kwargs)
    output.backward(grad)
    assert torch.equal(output, plain(**kwargs))
    torch.testing.assert_close(kwargs["input"].grad, grad @ kwargs["weight"].detach())
    assert kwargs["weight"].grad is None and kwargs["bias"].grad is None


@pytest.mark.parametrize(
    "changes",
    [{"grad_output_buffer": []}, {"wgrad_deferral_limit": 0}, {"gtp_remat_size": 2}],
)
def test_what_the_frozen_linear_refuses_runs_as_ever(changes: dict[str, Any]) -> None:
    kwargs = call(**changes)
    without_wgrad(plain, kwargs).sum().backward()
    assert kwargs["weight"].grad is not None


def test_behind_frozen_layers_the_weight_keeps_the_graph_alive() -> None:
    """Without any gradient the backward, in which statistics are taken, would not come."""
    kwargs = call(input=torch.randn(5, 64))
    without_wgrad(plain, kwargs).sum().backward()
    assert kwargs["weight"].grad is not None


def test_megatrons_own_linears_are_the_same_bit_by_bit(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    original = layers.linear_with_frozen_weight

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        called.append("frozen")
        result: torch.Tensor = original(*args, **kwargs)
        return result

    monkeypatch.setattr(layers, "linear_with_frozen_weight", counted)
    model = make_model(add_bias_linear=True)
    block = model.decoder.layers[0].mlp
    for linear in (block.linear_fc1, block.linear_fc2):
        inner = linear._forward_impl
        x = torch.randn(7, 2, linear.weight.shape[1])
        grad = torch.randn(7, 2, linear.weight.shape[0])
        results = []
        for measuring in (False, True):
            if measuring:
                linear._forward_impl = lambda inner=inner, **kwargs: without_wgrad(inner, kwargs)
            given = x.clone().requires_grad_()
            output, _ = linear(given)
            output.backward(grad)
            results.append((output.detach(), given.grad))
        for found, wanted in zip(*results, strict=True):
            assert torch.equal(found, wanted)
        del linear._forward_impl
    assert called == ["frozen", "frozen"]
