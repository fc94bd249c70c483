"""A chain of three small linears with tanh between, trained by AdamW, as a `PassRunner`.

Small enough for explicit Jacobians: `jacobians` gives how every G_t and X_t moves with every
weight, from autograd in FP64, to compare the probe's estimates with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from megatron_snip.statistics.recorder import MeasureSettings
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.reduce import LinearInfo
from megatron_snip.statistics.refresh import PassResult, RefreshInputs, measure
from megatron_snip.statistics.sensitivity import PlannedWeight
from megatron_snip.statistics.tap import Observer
from megatron_snip.topology import Placement, Topology

SIZES = (5, 6, 4, 3)
NAMES = tuple(f"decoder.layers.{i}.mlp.linear_fc1" for i in range(3))
TOKENS, MICROBATCHES = 7, 2


@dataclass
class Network:
    """Weights, optimizer and data; runs passes as Megatron's schedule would.

    Attributes:
        weights: [N, K] of each linear, FP32.
        optimizer: AdamW that has made `steps` steps.
        inputs: [M, K] of each microbatch.
        targets: [M, N] of each microbatch.
    """

    weights: list[torch.nn.Parameter]
    optimizer: Any
    inputs: list[torch.Tensor]
    targets: list[torch.Tensor]
    num_microbatches: int = MICROBATCHES
    grad_scale: float = 1.0
    passes: list[Observer] = field(default_factory=list)
    prepared: int = 0

    @classmethod
    def make(cls, steps: int = 5, optimizer: str = "adamw") -> Network:
        generator = torch.Generator().manual_seed(2)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        weights = [torch.nn.Parameter(draw(n, k) / k**0.5) for k, n in pairwise(SIZES)]
        made: Any = torch.optim.AdamW(weights, 1e-2, (0.9, 0.95), weight_decay=0.0)
        if optimizer == "sgd":
            made = torch.optim.SGD(weights, 1e-2)
        inputs = [draw(TOKENS, SIZES[0]) for _ in range(MICROBATCHES)]
        targets = [draw(TOKENS, SIZES[-1]) for _ in range(MICROBATCHES)]
        network = cls(weights, made, inputs, targets)
        for _ in range(steps):
            network._backward(None)
            made.step()
            made.zero_grad()
        return network

    @property
    def placements(self) -> list[Placement]:
        return [
            Placement(name, 0, "column", w.shape[1], w.shape[0])
            for name, w in zip(NAMES, self.weights, strict=True)
        ]

    def prepare(self) -> None:
        self.prepared += 1

    def finish(self) -> None:
        self.prepared -= 1

    def run(self, observer: Observer) -> PassResult:
        """See `PassRunner.run`."""
        self.passes.append(observer)
        loss = self._backward(observer)
        for w in self.weights:
            w.grad = None
        return PassResult(loss, self.num_microbatches)

    def _backward(self, observer: Observer | None) -> float:
        total = 0.0
        for x, target in zip(self.inputs, self.targets, strict=True):
            loss = self.forward(x, target, self.weights, observer)
            (loss / self.num_microbatches).backward()
            total += loss.item()
        return total

    def forward(
        self, x: torch.Tensor, target: torch.Tensor, weights: Any, observer: Observer | None
    ) -> torch.Tensor:
        """Mean squared error over tokens, in the tensors' own precision."""
        for placement, w in zip(self.placements, weights, strict=True):
            y = x @ w.t()
            if observer is not None:
                y = observer.observe(placement, x, w, y, sequence_parallel=False)
            x = torch.tanh(y)
        return (x - target).square().sum(1).mean()

    def refresh_inputs(self, relative_step: float = 1e-3) -> RefreshInputs:
        placements = self.placements
        return RefreshInputs(
            linears=tuple(LinearInfo.of(p) for p in placements),
            weights={
                p.instance: PlannedWeight(p, w)
                for p, w in zip(placements, self.weights, strict=True)
            },
            optimizer=self.optimizer,
            topology=Topology(),
            probe_relative_step=relative_step,
        )

    def measure(
        self, step: int = 0, rows: int = TOKENS, probes: int = 1, **kwargs: Any
    ) -> StatisticsTable:
        """Run both passes; `step` decides the probe's signs."""
        settings = MeasureSettings(("fp8", "fp4"), step, seed=1, num_rows=rows, num_probes=probes)
        return measure(self.refresh_inputs(**kwargs), settings, self)

    def jacobians(self, microbatch: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """For each linear: d G / d W_k [M, N, N_k, K_k] and d X / d W_k [M, K, ...] for all k."""
        x = self.inputs[microbatch].double()
        target = self.targets[microbatch].double()

        def tensors(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h, outputs, found = x, [], []
            for w in weights:
                found.append(h)
                outputs.append(h @ w.t())
                h = torch.tanh(outputs[-1])
            loss = (h - target).square().sum(1).mean() / self.num_microbatches
            grads = torch.autograd.grad(loss, outputs, create_graph=True)
            return (*grads, *found)

        weights = tuple(w.detach().double() for w in self.weights)
        both: Any = torch.autograd.functional.jacobian(tensors, weights)
        count = len(self.weights)
        return [(list(both[i]), list(both[count + i])) for i in range(count)]
