"""Measuring passes run no wgrad: the same output and dgrad, and what is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_snip.linears.measured import Elsewhere, spare_memory, without_wgrad
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.passes import MeasuringPasses
from megatron_snip.linears.runtime import Runtime
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
    output = without_wgrad(plain, kwargs, Elsewhere())
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
    without_wgrad(plain, kwargs, Elsewhere()).sum().backward()
    assert kwargs["weight"].grad is not None


def test_behind_frozen_layers_the_weight_keeps_the_graph_alive() -> None:
    """Without any gradient the backward, in which statistics are taken, would not come."""
    kwargs = call(input=torch.randn(5, 64))
    without_wgrad(plain, kwargs, Elsewhere()).sum().backward()
    assert kwargs["weight"].grad is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_a_gradient_that_is_formed_all_the_same_goes_elsewhere(enabled: bool) -> None:
    kwargs, elsewhere = call(input=torch.randn(5, 64)), Elsewhere()
    weight = kwargs["weight"]
    weight.main_grad = lent = torch.full_like(weight, 7.0)

    def add(gradient: torch.Tensor) -> None:
        weight.main_grad.add_(gradient)

    weight.register_hook(add)
    with elsewhere.watched([]):
        with torch.set_grad_enabled(enabled):  # off: the first forward of a recomputed layer
            output = without_wgrad(plain, kwargs, elsewhere)
        assert (weight.main_grad is lent) is not enabled
        if enabled:
            output.sum().backward()
            assert weight.main_grad.abs().sum() > 0
    assert weight.main_grad is lent
    assert torch.equal(lent, torch.full_like(lent, 7.0))


def test_a_gradient_that_comes_past_the_linear_goes_elsewhere() -> None:
    """A penalty on weights in the loss; DDP's hook adds what it gives to `main_grad`."""
    weights = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
    weights[1].requires_grad_(False)
    weight: Any = weights[0]
    weight.main_grad = lent = torch.full_like(weight, 7.0)

    def add(parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)

    weight.register_post_accumulate_grad_hook(add)
    with Elsewhere().watched(weights):
        assert weight.main_grad is lent  # no memory before there is a need
        weight.square().sum().backward()
        assert torch.equal(weight.main_grad, 2 * weight.detach())
    assert weight.main_grad is lent
    assert torch.equal(lent, torch.full_like(lent, 7.0))
    weight.grad = None
    weight.square().sum().backward()
    assert torch.equal(lent, 7.0 + 2 * weight.detach())


def test_operands_by_position_send_the_gradient_elsewhere(make_model: MakeModel) -> None:
    """Megatron passes them by keyword; what is passed otherwise runs as it is."""
    under = PlannedModel([make_model()], Topology(), seed=0)
    (linear, *_) = under.linears
    weight: Any = linear.weight
    weight.main_grad = lent = torch.zeros(weight.shape)
    linear._original = lambda x, w: x @ w.t()
    x = torch.randn(3, weight.shape[1], requires_grad=True)
    with under.runtime.observing(Tapping()):
        linear._forward(x, weight)
        assert weight.main_grad is not lent
    assert weight.main_grad is lent


def test_which_memory_is_spare() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16))
    assert spare_memory(weight) is None
    buffer = torch.zeros(100)
    for gradient, spare in [
        (buffer[8:32].view(4, 6), True),
        (torch.zeros(4, 6, dtype=torch.bfloat16), True),
        (torch.zeros(4, 6, dtype=torch.float16), False),  # BF16 does not fit into it
        (torch.zeros(6, 4).t(), False),
        (torch.zeros(4, 5), False),
        (torch.zeros(4, 6, device="meta"), False),
        (None, False),
    ]:
        weight.main_grad = gradient  # type: ignore[attr-defined]
        assert (spare_memory(weight) is gradient) is (spare or gradient is None)


def test_lent_memory_is_left_alone_until_the_end(make_model: MakeModel) -> None:
    model = make_model()
    under = PlannedModel([model], Topology(), seed=0)
    under.install()
    zeroed: list[int] = []
    model.zero_grad_buffer = lambda: zeroed.append(1)
    for linear in under.linears:
        linear.weight.main_grad = torch.full(linear.weight.shape, 7.0)  # type: ignore[attr-defined]
    weights = under.weights().values()
    assert all(w.spare is w.weight.main_grad for w in weights)  # type: ignore[attr-defined]
    passes = MeasuringPasses(training(model), under.runtime, 2)
    passes.prepare()
    passes.run(Tapping())
    assert zeroed == []
    assert all(torch.equal(w.spare, torch.full_like(w.spare, 7.0)) for w in weights)  # type: ignore[arg-type]
    passes.finish()
    assert zeroed == [1]
    passes.run(Tapping())
    assert zeroed == [1, 1]
    del model.zero_grad_buffer  # nobody would zero what lies there
    assert [w.spare for w in under.weights().values()] == [None] * len(weights)
    under.uninstall()


def test_parameters_are_gathered_before_memory_is_lent_only(make_model: MakeModel) -> None:
    """Some optimizers' parameters are gathered through the gradients' memory."""
    model: Any = make_model()
    gathered: list[dict[str, Any]] = []
    model.ddp_config = SimpleNamespace(overlap_param_gather=True)
    model.start_param_sync = lambda **kwargs: gathered.append(kwargs)
    passes = MeasuringPasses(training(model), Runtime(Topology(), 0), 2)
    passes.prepare()
    passes.run(Tapping())
    assert gathered == [{"force_sync": True}]
    passes.finish()
    passes.run(Tapping())
    assert len(gathered) == 2


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
                linear._forward_impl = lambda inner=inner, **kwargs: without_wgrad(
                    inner, kwargs, Elsewhere()
                )
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
