"""How much each weight's next optimizer update depends on its gradient, in factored form.

AdamW's update changes with its gradient by D = (1 - beta1) / (1 - beta1^t) / (sqrt(v^) + eps). Like
Adafactor (Shazeer and Stern, arXiv:1804.04235), 1 / D^2 is approximated by the outer product of its
row sums and column sums over their total,

    D[n, k] = row[n] col[k],    row = r^-1/2,   col = (c / sum c)^-1/2

so that a linear [N, K] needs N + K numbers, and a distributed optimizer, whose ranks own ranges of
the moments, adds vectors over the data axis instead of gathering matrices. docs/measuring.md
compares it with the exact D.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_snip.collectives import attempt, sum_together
from megatron_snip.statistics.optimizer_state import Shard, is_sharded, optimizer_shards
from megatron_snip.topology import Axis, LinearKind, Placement, Topology


class PlannedWeight(NamedTuple):
    """A weight of this rank that SNIP plans for.

    Attributes:
        placement: which linear and shard.
        weight: the parameter, [N, K] of this shard.
    """

    placement: Placement
    weight: torch.nn.Parameter


@dataclass(frozen=True)
class Sensitivity:
    """D of one weight's shard, and the size of its update.

    Attributes:
        row: FP32 [N].
        col: FP32 [K].
        update_square: |update|^2 over all shards of the linear, > 0.
    """

    row: Tensor
    col: Tensor
    update_square: float


@torch.no_grad()
def gather_sensitivities(
    weights: Mapping[str, PlannedWeight], optimizer: Any, topology: Topology
) -> dict[str, Sensitivity]:
    """All ranks: return the sensitivity of each of this rank's weights, by instance.

    A weight without moments for all its elements (a first step, another optimizer) is left out.

    Args:
        weights: this rank's planned weights, by `Placement.instance`, the same keys in the same
            order on all ranks of an axis.
        optimizer: Megatron's (see optimizer_state.py).
        topology: this rank's place.

    Raises:
        RemoteFailure: on every rank, if one cannot read its moments.
    """
    sums = attempt(
        "reading the optimizer's state", lambda: _own_sums(weights, optimizer), topology.control
    )
    sharded = is_sharded(optimizer)
    by_axes: dict[tuple[Axis, Axis], list[str]] = defaultdict(list)
    for instance, planned in weights.items():
        data = topology.data_axis(planned.placement) if sharded else Axis()
        by_axes[data, planned.placement.tensor].append(instance)
    for (data, tensor), instances in by_axes.items():
        _add([part for i in instances for part in sums[i]], data.group)
        kinds = [weights[i].placement.kind for i in instances]
        parts = [p for i, kind in zip(instances, kinds, strict=True) for p in sums[i].shared(kind)]
        _add(parts, tensor.group)
    return _complete(weights, sums)


def _own_sums(weights: Mapping[str, PlannedWeight], optimizer: Any) -> dict[str, _ShardSums]:
    shards = optimizer_shards(optimizer)
    return {i: _ShardSums.of(w.weight, shards.get(w.weight)) for i, w in weights.items()}


class _ShardSums(NamedTuple):
    """Sums of 1 / D^2 over the elements whose moments are here, FP64.

    Attributes:
        rows: [N].
        cols: [K].
        scalars: [2], elements with moments and |update|^2.
    """

    rows: Tensor
    cols: Tensor
    scalars: Tensor

    @classmethod
    def of(cls, weight: torch.nn.Parameter, shard: Shard | None) -> _ShardSums:
        num_rows, num_cols = weight.shape
        new = weight.data.new_zeros
        rows, cols = (new(n, dtype=torch.float64) for n in (num_rows, num_cols))
        scalars = new(2, dtype=torch.float64)
        if shard is not None and (found := shard.slope_and_update()) is not None:
            d, update = found
            scalars[0] = shard.end - shard.start
            scalars[1] = torch.linalg.vector_norm(update).double().square()
            inverse = d.square_().reciprocal_()
            # The end of a row, complete rows, the beginning of a row.
            head = min(-shard.start % num_cols, inverse.numel())
            tail = (inverse.numel() - head) % num_cols
            at = shard.start
            for part in torch.split(inverse, [head, inverse.numel() - head - tail, tail]):
                first, offset = divmod(at, num_cols)
                part = part.view(-1, min(num_cols, max(part.numel(), 1)))
                rows[first : first + part.shape[0]] += part.sum(1, dtype=torch.float64)
                cols[offset : offset + part.shape[1]] += part.sum(0, dtype=torch.float64)
                at += part.numel()
        return cls(rows, cols, scalars)

    def shared(self, kind: LinearKind) -> list[Tensor]:
        """What the shards of a linear have in common and must be added over them."""
        return [self.cols if kind == "column" else self.rows, self.scalars]


def _complete(
    weights: Mapping[str, PlannedWeight], sums: Mapping[str, _ShardSums]
) -> dict[str, Sensitivity]:
    found = {}
    numbers = torch.stack([s.scalars for s in sums.values()]).tolist() if sums else []
    for (instance, planned), (known, update_square) in zip(weights.items(), numbers, strict=True):
        placement, part = planned.placement, sums[instance]
        if known == placement.in_features * placement.out_features and update_square > 0:
            total = (part.cols if placement.kind == "column" else part.rows).sum()
            row, col = part.rows.rsqrt(), (part.cols / total).rsqrt()
            found[instance] = Sensitivity(row.float(), col.float(), update_square)
    return found


def _add(parts: list[Tensor], group: Any) -> None:
    """All ranks of a group: add tensors over it, in place, in one exchange."""
    if group is not None and parts:
        for part, total in zip(parts, sum_together(parts, group), strict=True):
            part.copy_(total)
