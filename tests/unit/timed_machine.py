"""A machine whose linears take known seconds, by a clock of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_snip.linears import calibrate
from megatron_snip.linears.calibrate import TimedLinear, TimedShape
from megatron_snip.options import Option

MS = 2**-10
"""Differences of its multiples are exact."""


class Machine:
    """A machine whose linears take the seconds that a test says; with a clock of its own.

    Attributes:
        now: seconds of the clock.
        seconds: of fprop, dgrad and wgrad, and of quantizing X for wgrad, which the forward does.
        disturbance: seconds that other work adds to a run, given its number.
        share: what an option takes of these seconds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.seconds = (1 * MS, 2 * MS, 4 * MS, MS / 2)
        self.disturbance: Callable[[int], float] = lambda run: 0.0
        self.runs = 0
        self.share: Callable[[Option], float] = lambda option: 1.0
        self.now_share = 1.0
        machine = self

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                machine.runs += 1
                machine.now += machine.seconds[0] * machine.now_share
                machine.now += machine.disturbance(machine.runs)
                ctx.save_for_backward(x, weight)
                return x.new_zeros(len(x), len(weight))

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
                x, weight = ctx.saved_tensors
                machine.now += machine.seconds[1] * machine.now_share
                if not ctx.needs_input_grad[1]:
                    return torch.zeros_like(x), None
                machine.now += machine.seconds[2] * machine.now_share
                return torch.zeros_like(x), torch.zeros_like(weight)

        def linear(shape: TimedShape, option: Option, x: Tensor) -> TimedLinear:
            weight = torch.zeros(shape.out_features, shape.in_features, requires_grad=True)

            def forward() -> Tensor:
                self.now_share = self.share(option)
                self.now += self.seconds[3] if weight.requires_grad else 0.0
                y: Tensor = Product.apply(x, weight)  # type: ignore[no-untyped-call]
                return y

            return forward, weight

        monkeypatch.setattr(calibrate, "simulated_linear", linear)
        monkeypatch.setattr(calibrate.time, "perf_counter", lambda: self.now)
