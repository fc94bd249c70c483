"""One linear with made-up tensors, observed in a shard as a training step would show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_snip.statistics.coupling import couple
from megatron_snip.statistics.probe import Comparer
from megatron_snip.statistics.recorder import MeasureSettings, Recorder
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.reduce import LinearInfo, ReduceInputs, reduce_statistics
from megatron_snip.statistics.sampling import sampled_rows
from megatron_snip.topology import LinearKind, Placement, Topology
from tests.unit.statistics.equations import Linear, Microbatch, Scales, base_row, format_row

NAME = "decoder.layers.3.mlp.linear_fc1"
TOKENS, K, N = 128, 256, 512
SEED, STEP, ROWS, EPS, GRAD_SCALE = 3, 11, 20, 0.25, 0.5
FORMATS = ("fp8", "fp4")


@dataclass(frozen=True)
class Toy:
    """A linear and its microbatches, whole, the same on every rank.

    Attributes:
        kind: how it is sharded.
        num_chunks: 2 for a gated linear.
        linear: weight, D and |update|^2.
        batches: by global index: local index * data size + data rank.
        dtype: of X, W and G.
    """

    kind: LinearKind
    num_chunks: int
    linear: Linear
    batches: list[Microbatch]
    dtype: torch.dtype

    @classmethod
    def make(
        cls,
        kind: LinearKind = "column",
        num_chunks: int = 1,
        num_batches: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> Toy:
        rng = np.random.default_rng(5)

        def draw(*shape: int) -> Any:
            values = rng.standard_normal(shape) * rng.uniform(0.1, 2.0, shape[-1])
            return torch.from_numpy(values).to(dtype).float().numpy()

        d = np.abs(draw(N, K)) + 0.1
        linear = Linear(NAME, draw(N, K), d, update_square=7.0)
        batches = []
        for index in range(num_batches):
            x, g = draw(TOKENS, K), draw(TOKENS, N)
            x_probe = (x + 0.1 * draw(TOKENS, K)).astype("f4")
            g_probe = (g + 0.1 * draw(TOKENS, N)).astype("f4")
            rows = sampled_rows(TOKENS, ROWS, SEED, STEP, index).numpy()
            batches.append(Microbatch(index, x, g, x_probe, g_probe, rows))
        return cls(kind, num_chunks, linear, batches, dtype)

    def placement(self, topology: Topology) -> Placement:
        return Placement(NAME, 1, self.kind, K, N, topology.tensor, self.num_chunks)

    def wanted(self, data_size: int = 1) -> dict[str, float]:
        """The row that all ranks together must find."""
        tokens = TOKENS * len(self.batches)
        bits = None if self.dtype == torch.float32 else 7
        s = Scales(tokens, GRAD_SCALE, EPS, SEED, STEP, bits)
        row = base_row(self.linear, self.batches, s)
        for name in FORMATS:
            values = format_row(self.linear, self.batches, name, s)
            row |= {f"{name}.{key}": value for key, value in values.items()}
        return row

    def observed(self, topology: Topology, sequence_parallel: bool = False) -> StatisticsTable:
        """Show this rank its shards in a pass A and a pass B, and reduce over all ranks."""
        placement = self.placement(topology)
        settings = MeasureSettings(FORMATS, STEP, SEED, ROWS)
        d = self._shard(self.linear.d, self._weight_dim, topology)
        recorder = Recorder(settings, topology, {NAME: d})
        self._show(recorder, topology, sequence_parallel, probed=False)
        assert recorder.failure is None, recorder.failure
        comparer = Comparer(recorder.observations)
        self._show(comparer, topology, sequence_parallel, probed=True)
        assert comparer.failure is None, comparer.failure
        weight = self._shard(self.linear.w, self._weight_dim, topology)
        seen = recorder.observations[NAME]
        assert couple(placement, weight, seen, settings, recorder.signs) is None
        inputs = ReduceInputs(
            step=STEP,
            formats=FORMATS,
            linears=(LinearInfo("decoder.layers.0.x", 0, 1, 1, 6.0), LinearInfo.of(placement)),
            placements={NAME: placement},
            observations=recorder.observations,
            update_square={NAME: self.linear.update_square},
            eps=EPS,
            grad_scale=GRAD_SCALE,
            num_microbatches=len(self.batches) // topology.data.size,
            loss_sum=2.0 + topology.data.rank if topology.tensor.rank == 0 else 0.0,
            loss_count=1 if topology.tensor.rank == 0 else 0,
        )
        return reduce_statistics(inputs, topology)

    @property
    def _weight_dim(self) -> int:
        return 0 if self.kind == "column" else 1

    def _show(
        self, observer: Any, topology: Topology, sequence_parallel: bool, probed: bool
    ) -> None:
        """Run this rank's microbatches through `observer`, each with its own backward."""
        axis = topology.tensor
        weight = self._shard(self.linear.w, self._weight_dim, topology).requires_grad_()
        for batch in self.batches[topology.data.rank :: topology.data.size]:
            x = torch.from_numpy(batch.x_probe if probed else batch.x).to(self.dtype)
            g = torch.from_numpy(batch.g_probe if probed else batch.g).to(self.dtype)
            if self.kind == "column":
                g = self._shard(g, 1, topology)
            else:
                x = self._shard(x, 1, topology)
            y = x @ weight.t()
            if sequence_parallel:
                x = x.chunk(axis.size, 0)[axis.rank]
            tapped = observer.observe(self.placement(topology), x, weight, y, sequence_parallel)
            tapped.backward(g)

    def _shard(self, whole: Any, dim: int, topology: Topology) -> torch.Tensor:
        tensor = torch.as_tensor(whole).to(self.dtype)
        axis = topology.tensor
        chunks = tensor.chunk(self.num_chunks, dim)
        return torch.cat([c.chunk(axis.size, dim)[axis.rank] for c in chunks], dim).clone()


def row_of(table: StatisticsTable) -> dict[str, float]:
    """The toy's row, with formats' fields as `format.field`."""
    linear = table.linears[1]
    row = {k: float(v) for k, v in vars(linear).items() if isinstance(v, int | float)}
    for name, statistics in linear.formats.items():
        row |= {f"{name}.{k}": v for k, v in vars(statistics).items()}
    return row


def errors(found: dict[str, float], wanted: dict[str, float]) -> dict[str, float]:
    """Relative errors; of signed sums, relative to the size of their terms."""
    result = {}
    for key, value in wanted.items():
        form, _, field = key.rpartition(".")
        size = abs(value)
        if field in ("first", "first_abs", "first_square"):
            size = np.sqrt(wanted[f"{form}.output_error_square"] * wanted["grad_square"])
            size = size**2 if field == "first_square" else size
        if field == "scale_square":  # its terms cancel over channels and pairs of tokens
            size = max(size, 8 * wanted["scale_channel_square"])
        if field == "forward_whole_square":  # likewise
            size = max(size, 8 * wanted[f"{form}.forward_channel_square"])
        result[key] = abs(found[key] - value) / (size or 1.0)
    return result
