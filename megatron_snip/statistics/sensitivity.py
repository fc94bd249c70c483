"""D for every planned weight, whole on every rank that holds the weight, and |update|^2.

With a distributed optimizer each data rank owns the moments of a range only; ranges are put into
a zero-filled buffer and added over the data axis, which is exact (every element comes from one
rank). The probe later keeps the original weights in the buffers. They are a copy of the stage's
weights; where measuring passes form no gradient of a weight, the gradient's memory serves.

Everything that can fail on one rank alone (reading the optimizer, making the buffers) comes first
and is agreed on; what is left are sums in which all ranks take part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_snip.collectives import attempt, sum_over
from megatron_snip.statistics.optimizer_state import AdamShard, adam_shards, is_sharded
from megatron_snip.topology import DataAxis, Placement, TensorAxis, Topology


@dataclass
class PlannedWeight:
    """A weight of this rank that SNIP plans for.

    Attributes:
        placement: which linear and shard.
        weight: the parameter, [N, K] of this shard.
        spare: [N, K], FP32 or the weight's dtype: memory that is anybody's between the passes'
            `prepare` and `finish`; None: there is none.
    """

    placement: Placement
    weight: torch.nn.Parameter
    spare: torch.Tensor | None = None


@dataclass
class Sensitivity:
    """How one weight's update depends on its gradient.

    Attributes:
        d: D [N, K], as the weight's dtype holds it, in the spare memory if there is any; ones where
            the optimizer has no moments yet.
        update_square: |update|^2 over the whole linear, or None where there are no moments (then
            the gradient's own norm, known after pass A, takes its place).
        direction_square: |D|^2 over the whole linear.
        weight_square: |W|^2 over the whole linear.
    """

    d: torch.Tensor
    update_square: float | None
    direction_square: float
    weight_square: float


@torch.no_grad()
def gather_sensitivity(
    weights: Mapping[str, PlannedWeight], optimizer: Any, topology: Topology
) -> dict[str, Sensitivity]:
    """All ranks: return the sensitivity of each of this rank's weights, by instance.

    Args:
        weights: this rank's planned weights, by `Placement.instance`, the same keys in the same
            order on all ranks of an axis.
        optimizer: Megatron's (see optimizer_state.py).
        topology: this rank's place.

    Raises:
        RemoteFailure: on every rank, if one cannot read or hold its part.
    """
    sharded, parts, scratch = attempt(
        "reading the optimizer's state",
        lambda: _own_parts(weights, optimizer, topology),
        topology.control,
    )
    if sharded:
        for instance, planned in weights.items():
            group = topology.data_axis(planned.placement).group
            _sum_parts(parts[instance][0], scratch.get(planned.weight.dtype), group)
    scalars = {instance: part[1] for instance, part in parts.items()}
    _sum_scalars(weights, scalars, topology, sharded)
    return {
        instance: _finish(planned, parts[instance][0], scalars[instance])
        for instance, planned in weights.items()
    }


_Part = tuple[torch.Tensor, torch.Tensor]
"""(buffer with D in this rank's range, FP64 [elements with moments, |update|^2, |D|^2, |W|^2])."""


def _own_parts(
    weights: Mapping[str, PlannedWeight], optimizer: Any, topology: Topology
) -> tuple[bool, dict[str, _Part], dict[torch.dtype, torch.Tensor]]:
    """Return whether moments are sharded, this rank's part of each weight, and scratch memory.

    Parts travel in the weights' dtype, through the scratch memory where their buffers have another.
    """
    shards = adam_shards(optimizer)
    sharded = is_sharded(optimizer)
    parts = {}
    for instance, planned in weights.items():
        # Of the ranks that hold a weight, one counts it.
        counts = not sharded or topology.data_axis(planned.placement).rank == 0
        parts[instance] = _own_part(planned, shards.get(planned.weight), counts)
    scratch: dict[torch.dtype, torch.Tensor] = {}
    for instance, planned in weights.items() if sharded else ():
        dtype, size = planned.weight.dtype, planned.weight.numel()
        enough = dtype in scratch and scratch[dtype].numel() >= size
        if parts[instance][0].dtype != dtype and not enough:
            scratch[dtype] = planned.weight.new_empty(size)
    return sharded, parts, scratch


def _sum_parts(buffer: torch.Tensor, scratch: torch.Tensor | None, group: Any) -> None:
    """All ranks of a data axis: add their parts of one weight's D, in place."""
    if scratch is None or scratch.dtype == buffer.dtype:
        sum_over(buffer, group)
    else:
        part = scratch[: buffer.numel()].view_as(buffer)
        buffer.copy_(sum_over(part.copy_(buffer), group))


def _own_part(planned: PlannedWeight, shard: AdamShard | None, counts: bool) -> _Part:
    weight, spare = planned.weight, planned.spare
    buffer = torch.zeros_like(weight.data) if spare is None else spare.zero_()
    scalars = torch.zeros(4, dtype=torch.float64, device=weight.device)
    d = shard.sensitivity() if shard is not None else None
    if shard is not None and d is not None:
        update = shard.update()
        assert update is not None
        own = buffer.view(-1)[shard.start : shard.end].copy_(d.to(weight.dtype))
        scalars[0] = shard.end - shard.start
        scalars[1] = _square(update)
        scalars[2] = _square(own)
    if counts:
        scalars[3] = _square(weight.data)
    return buffer, scalars


def _sum_scalars(
    weights: Mapping[str, PlannedWeight],
    scalars: Mapping[str, torch.Tensor],
    topology: Topology,
    sharded: bool,
) -> None:
    """Add the scalars over the data axis (if the moments are sharded) and the tensor axis."""
    by_axes: dict[tuple[DataAxis, TensorAxis], list[str]] = defaultdict(list)
    for instance, planned in weights.items():
        data = topology.data_axis(planned.placement) if sharded else DataAxis()
        by_axes[data, planned.placement.tensor].append(instance)
    for (data, tensor), instances in by_axes.items():
        stacked = torch.stack([scalars[i] for i in instances])
        sum_over(sum_over(stacked, data.group), tensor.group)
        for instance, row in zip(instances, stacked, strict=True):
            scalars[instance].copy_(row)


def _finish(planned: PlannedWeight, buffer: torch.Tensor, scalars: torch.Tensor) -> Sensitivity:
    known, update_square, direction_square, weight_square = scalars.tolist()
    size = float(planned.placement.in_features * planned.placement.out_features)
    whole = known == size
    if not whole:  # no moments yet, or for a part only: fall back to the plain gradient
        buffer.fill_(1)
        direction_square = size
    usable = whole and update_square > 0
    return Sensitivity(buffer, update_square if usable else None, direction_square, weight_square)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor.float())
    return norm.double().square()
