"""Measuring passes run no wgrad: the same output and dgrad, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_snip.linears.measured import without_wgrad
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.passes import MeasuringPasses
from megatron_snip.statistics.tap import tap
from megatron_snip.topology import Topology
from tests.unit.linears.conftest import MakeModel
from tests.unit.linears.test_passes import training


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


class Tapping:
    """An observer that counts backwards."""

    def __init__(self) -> None:
        self.backwards = 0

    def observe(self, placement: Any, input: Any, weight: Any, output: Any, sp: bool) -> Any:
        def on_backward(*operands: torch.Tensor) -> None:
            self.backwards += 1

        return tap(output, input, weight, on_backward)


def test_hooks_that_wait_for_a_weights_gradient_hear_of_no_pass(make_model: MakeModel) -> None:
    """DDP's are such, and refuse to be called without one where they overlap the reduction."""
    under = PlannedModel([make_model()], Topology(), seed=0)
    under.install()
    called: list[str] = []
    nodes = []  # a hook lives as long as its node
    for linear in under.linears:
        grad_fn = linear.weight.expand_as(linear.weight).grad_fn
        assert grad_fn is not None
        node = grad_fn.next_functions[0][0]
        assert node is not None
        node.register_hook(lambda *_, name=linear.placement.name: called.append(name))
        nodes.append(node)
    watcher = Tapping()
    MeasuringPasses(training(under.chunks[0]), under.runtime, 2).run(watcher)
    assert (watcher.backwards, called) == (2 * len(nodes), [])
    under.uninstall()
