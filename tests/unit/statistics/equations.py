"""The statistics of one linear in FP64 NumPy, straight from their definitions, and a toy to test.

Quantizers are the product's own (they have tests of their own against ml_dtypes and torchao);
everything else is independent of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_snip.collectives import Control
from megatron_snip.formats import get_format
from megatron_snip.quantizers.quantize import quantize_dequantize_operand
from megatron_snip.quantizers.stochastic import grad_output_stream
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.operands import MEASURED_IN
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Axis, Placement, Topology
from megatron_snip.types import Gemm, Operand

FORMATS = {name: get_format(name) for name in ("fp8", "fp4")}
NAME = "decoder.layers.3.mlp.linear_fc1"
SEED, STEP = 5, 7
MEASURED = ("microbatches", "tokens", "input_square", "weight_square", "grad_square")
MEASURED_IN_FORMAT = ("input_error_square", "weight_error_square", "grad_error_square")


@dataclass
class Toy:
    """One linear on some microbatches, complete or as the shard of a rank."""

    kind: Any  # how ranks of a tensor axis share it
    inputs: list[torch.Tensor]  # X of each microbatch, [M, K]
    weight: torch.Tensor  # [N, K]
    grads: list[torch.Tensor]  # G of each microbatch, [M, N]
    health: HealthTable | None = None  # of the last `observed`

    @classmethod
    def make(cls, kind: str, microbatches: int = 2, tokens: int = 128) -> Toy:
        g = torch.Generator().manual_seed(11)
        k, n = 256, 512

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g) * torch.rand(shape[-1], generator=g)

        return cls(
            kind,
            [draw(tokens, k) for _ in range(microbatches)],
            0.1 * draw(n, k),
            [0.01 * draw(tokens, n) for _ in range(microbatches)],
        )

    def placement(self, topology: Topology) -> Placement:
        rows, cols = self.weight.shape
        return Placement(NAME, 0, self.kind, cols, rows, topology.tp)

    def observed(
        self,
        topology: Topology,
        settings: MeasureSettings | None = None,
        split: bool = False,
        grad_scale: float = 1.0,
    ) -> StatisticsTable:
        """Run every microbatch of this data rank forward and backward under an observer."""
        settings = settings or MeasureSettings(FORMATS, STEP, SEED, all_tokens=True)
        place = self.placement(topology)
        observer = StepObserver(settings, topology)
        weight_dim = 0 if self.kind == "column" else 1
        weight = self._shard(self.weight, weight_dim, self.kind, topology).requires_grad_()
        axis, data = topology.tp, topology.data
        for x, g in list(zip(self.inputs, self.grads, strict=True))[data.rank :: data.size]:
            x = self._shard(x, 1, "row", topology)
            g = self._shard(g, 1, "column", topology)
            if split:  # what a column-parallel linear gathers under sequence parallelism
                full, x = x, x.chunk(axis.size)[axis.rank]
            output = torch.nn.functional.linear(full if split else x, weight)
            tapped = observer.observe(place, x, weight, output, input_is_split=split)
            tapped.backward(g)
        info = self.placement(Topology()).info
        table, self.health = observer.table([info], grad_scale, 2.0)
        return table

    def _shard(self, t: torch.Tensor, dim: int, kind: str, topology: Topology) -> torch.Tensor:
        axis = topology.tp
        complete = self.kind != kind or axis.size == 1
        return t.clone() if complete else t.chunk(axis.size, dim)[axis.rank].clone()

    def wanted(self, grad_scale: float = 1.0) -> dict[str, float]:
        """What is measured, by field or format.field."""
        tensors = {
            Operand.INPUT: self.inputs,
            Operand.WEIGHT: [self.weight],
            Operand.GRAD_OUTPUT: self.grads,
        }
        found = {
            "microbatches": float(len(self.inputs)),
            "tokens": float(sum(len(x) for x in self.inputs)),
        }
        for operand, parts in tensors.items():
            name = "grad" if operand is Operand.GRAD_OUTPUT else operand.value
            unit = grad_scale if operand is Operand.GRAD_OUTPUT else 1.0
            numpy = [unit * part.double().numpy() for part in parts]
            found[f"{name}_square"] = float(sum((x**2).sum() for x in numpy))
            for fmt in FORMATS:
                quantized = [
                    unit * self.quantized(part, fmt, operand, MEASURED_IN[operand], m)
                    for m, part in enumerate(parts)
                ]
                pairs = zip(quantized, numpy, strict=True)
                error = sum(((q - x) ** 2).sum() for q, x in pairs)
                found[f"{fmt}.{name}_error_square"] = float(error)
        return found

    def wgrad_error(self, fmt: str, microbatch: int) -> Any:
        """eW of one microbatch, FP64."""
        x, g = self.inputs[microbatch], self.grads[microbatch]
        x_q = self.quantized(x, fmt, Operand.INPUT, Gemm.WGRAD, microbatch)
        g_q = self.quantized(g, fmt, Operand.GRAD_OUTPUT, Gemm.WGRAD, microbatch)
        return g_q.T @ x_q - g.double().numpy().T @ x.double().numpy()

    def quantized(
        self, t: torch.Tensor, fmt: str, operand: Operand, gemm: Gemm, microbatch: int
    ) -> Any:
        stream = grad_output_stream(SEED, self.placement(Topology()), STEP, microbatch)
        q = quantize_dequantize_operand(t, fmt, operand, gemm, stream=stream, dtype=torch.float32)
        return q.double().numpy()


def row_of(table: StatisticsTable) -> dict[str, float]:
    """What was measured of the first linear, by field or format.field."""
    (linear,) = table.linears
    row = {name: getattr(linear, name) for name in MEASURED}
    for fmt, errors in linear.formats.items():
        row |= {f"{fmt}.{name}": getattr(errors, name) for name in MEASURED_IN_FORMAT}
        row |= {f"{fmt}.{name}": value for name, value in errors.added.items()}
    return row


def largest_error(found: dict[str, float], wanted: dict[str, float]) -> float:
    """The largest relative error."""
    assert set(found) == set(wanted)
    return max(abs(found[name] / value - 1) for name, value in wanted.items())


def axis_topology(rank: int, size: int, group: Any, axis: str) -> Topology:
    """A topology of `size` ranks along one axis."""
    along: dict[str, Any] = {axis: Axis(rank, size, group)}
    return Topology(rank=rank, world_size=size, control=Control(group), **along)
