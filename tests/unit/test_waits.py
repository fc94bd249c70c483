"""No linear makes the host wait for a GPU: not when it is simulated, nor when it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_snip.linears.quantized_linear import LinearCall, quantized_linear
from megatron_snip.options import Option
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.statistics.gradients import gradient_norms
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Placement, Topology
from tests.unit.statistics.equations import FORMATS

READS = tuple(
    getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__int__", "__float__")
)
PLACE = Placement("decoder.layers.0.mlp.linear_fc1", 0, "column", 128, 256)


class Waits(TorchFunctionMode):
    """Notes where a tensor's number is read, and where a number is assigned: `tensor[i] = 1.0`.

    PyTorch copies an assigned number to the GPU and waits; `tensor[i].fill_(1.0)` does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        assigns = function is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor)
        if assigns or function in READS:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_reads_and_assigned_numbers_are_noted() -> None:
    tensor = torch.zeros(3)
    with Waits() as waits:
        tensor[0] = 1.0
        tensor[1:] = tensor[:1]
        tensor[2].fill_(2.0)
        found = [tensor[0].item(), tensor.tolist(), bool(tensor[0] > 0)]
    assert found == [1.0, [1.0, 1.0, 2.0], True]
    assert waits.found == ["__setitem__", "item", "tolist", "__bool__"]


@pytest.mark.parametrize("option", ["fp8", "fp4", "fp8_tensorwise", "nvfp4"])
def test_a_simulated_linear_waits_for_nothing(option: str) -> None:
    stream = StochasticStream(StreamKey(seed=0, linear="linear", iteration=0, microbatch=0))
    call = LinearCall(Option.parse(option), lambda: stream, cache={})
    x = torch.randn(256, 128).requires_grad_()
    weight = torch.randn(256, 128).requires_grad_()
    with Waits() as waits:
        for _ in range(2):
            y = quantized_linear(x, weight, None, call)
            y.backward(torch.ones_like(y))
    assert not waits.found


@pytest.mark.parametrize("all_tokens", [False, True])
def test_a_measured_linear_waits_for_nothing(all_tokens: bool) -> None:
    weight = torch.randn(256, 128).requires_grad_()
    optimizer = torch.optim.AdamW([weight])
    settings = MeasureSettings(FORMATS, iteration=3, seed=0, all_tokens=all_tokens)
    observer = StepObserver(settings, Topology())
    with Waits() as waits:
        for _ in range(2):
            x = torch.randn(1024, 128)
            output = torch.nn.functional.linear(x, weight)
            observer.observe(PLACE, x, weight, output).sum().backward()
        gradient_norms({PLACE: weight}, optimizer, Topology(), loss_scale=1.0)
    assert not waits.found
