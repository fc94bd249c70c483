"""The statistics of one linear in FP64 NumPy, straight from their definitions, and a toy to test.

Quantizers are the product's own (they have tests of their own against ml_dtypes and torchao);
everything else is independent of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_snip.collectives import Control
from megatron_snip.formats import get_format
from megatron_snip.quantizers.quantize import quantize_dequantize_operand
from megatron_snip.quantizers.stochastic import grad_output_stream
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.records import PRODUCT_COLUMNS, StatisticsTable
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.statistics.sensitivity import Sensitivity
from megatron_snip.topology import Axis, Placement, Topology
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand

FORMATS = {name: get_format(name) for name in ("fp8", "fp4")}
NAME = "decoder.layers.3.mlp.linear_fc1"
SEED, STEP = 5, 7


@dataclass
class Toy:
    """One linear on some microbatches, complete or as the shard of a rank."""

    kind: Any  # how ranks of a tensor axis share it
    inputs: list[torch.Tensor]  # X of each microbatch, [M, K]
    weight: torch.Tensor  # [N, K]
    grads: list[torch.Tensor]  # G of each microbatch, [M, N]
    row: torch.Tensor  # with `col`: the factors of D
    col: torch.Tensor
    update_square: float = 2.5
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
            torch.rand(n, generator=g) + 0.5,
            torch.rand(k, generator=g) + 0.5,
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
        factors = ((self.row, "column"), (self.col, "row"))
        parts = [self._shard(factor, 0, kind, topology) for factor, kind in factors]
        d = Sensitivity(*parts, self.update_square, step_square=0.0)
        observer = StepObserver(settings, topology, {place: d})
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
        """The row of the table, by field or format.field."""
        w = self.weight.double().numpy()
        found: dict[str, float] = {"microbatches": 0.0, "tokens": 0.0}
        total = sum(len(x) for x in self.inputs)

        def add(name: str, value: Any) -> None:
            found[name] = found.get(name, 0.0) + float(value)

        square = lambda a: (a**2).sum()  # noqa: E731
        for m, (x_t, g_t) in enumerate(zip(self.inputs, self.grads, strict=True)):
            x, g = x_t.double().numpy(), grad_scale * g_t.double().numpy()
            y, dx, dw = x @ w.T, g @ w, g.T @ x
            tensors = dict(zip(Operand, (x_t, self.weight, g_t), strict=True))
            scales = dict(zip(Operand, (1.0, 1.0, grad_scale), strict=True))
            add("microbatches", 1)
            add("tokens", len(x))
            for name, a in (("input", x), ("output", y), ("grad", g), ("input_grad", dx)):
                add(f"{name}_square", square(a))
            add("wgrad_square", square(dw))
            for fmt in FORMATS:
                q = {
                    (o, gemm): self.quantized(tensors[o], fmt, o, gemm, m) * scales[o]
                    for gemm, operands in GEMM_OPERANDS.items()
                    for o in operands
                }
                x_q, w_q = q[Operand.INPUT, Gemm.FPROP], q[Operand.WEIGHT, Gemm.FPROP]
                e_y = x_q @ w_q.T - y
                e_x = q[Operand.GRAD_OUTPUT, Gemm.DGRAD] @ q[Operand.WEIGHT, Gemm.DGRAD] - dx
                g_q = q[Operand.GRAD_OUTPUT, Gemm.WGRAD]
                e_w = g_q.T @ q[Operand.INPUT, Gemm.WGRAD] - dw
                products = (g * e_y).sum(1)
                d = np.outer(self.row.double().numpy(), self.col.double().numpy())
                per_token = (e_y**2).sum(1) * (g**2).sum(1)
                add(f"{fmt}.first", products.sum())
                add(f"{fmt}.fisher", 0.5 * per_token.sum() * total / len(w))
                add(f"{fmt}.aligned_fisher", 0.5 * square(products) * total)
                add(f"{fmt}.local_square", square(d * e_w) / self.update_square)
                add(f"{fmt}.output_error_square", square(e_y))
                add(f"{fmt}.input_grad_error_square", square(e_x))
                add(f"{fmt}.wgrad_error_square", square(e_w))
                add(f"{fmt}.input_error_square", square(x_q - x))
                add(f"{fmt}.grad_error_square", square(g_q - g))
                found[f"{fmt}.weight_error_square"] = float(square(w_q - w))
        found["weight_square"] = float(square(w))
        found["update_square"] = self.update_square
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
    """The first linear's row, by field or format.field."""
    (linear,) = table.linears
    row = {k: v for k, v in vars(linear).items() if isinstance(v, float)}
    row.pop("flops_per_token")
    for name, values in linear.formats.items():
        errors = {key: value for key, value in vars(values).items() if key != "added"}
        row |= {f"{name}.{key}": value for key, value in (errors | values.added).items()}
    return row


def is_of_products(name: str) -> bool:
    return name.rpartition(".")[2] in PRODUCT_COLUMNS


def wanted_norms(toy: Toy, grad_scale: float = 1.0) -> dict[str, float]:
    """What is measured, by name: as `Toy.wanted`, with errors of G in the tiles of dgrad."""
    found = {k: v for k, v in toy.wanted(grad_scale).items() if not is_of_products(k)}
    for fmt in FORMATS:
        square = 0.0
        for m, g in enumerate(toy.grads):
            error = toy.quantized(g, fmt, Operand.GRAD_OUTPUT, Gemm.DGRAD, m) - g.double().numpy()
            square += float((grad_scale**2 * error**2).sum())
        found[f"{fmt}.grad_error_square"] = square
    return found


def largest_error(found: dict[str, float], wanted: dict[str, float]) -> float:
    """The largest relative error; the signed first order is compared with the size of its terms."""
    assert set(found) == set(wanted)
    errors = []
    for key, value in wanted.items():
        size = abs(value)
        if key.endswith(".first"):
            error = wanted[key.replace("first", "output_error_square")]
            size = (error * wanted["grad_square"]) ** 0.5
        errors.append(abs(found[key] - value) / size)
    return max(errors)


def axis_topology(rank: int, size: int, group: Any, axis: str) -> Topology:
    """A topology of `size` ranks along one axis."""
    along: dict[str, Any] = {axis: Axis(rank, size, group)}
    return Topology(rank=rank, world_size=size, control=Control(group), **along)
