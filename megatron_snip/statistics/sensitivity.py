"""Sensitivity D of each weight in factors, over all ranks; norms of gradient and update.

As in Adafactor (Shazeer and Stern, arXiv:1804.04235), 1 / D^2 is approximated by the outer product
of its row sums r and column sums c over their total,

    D[n, k] = row[n] col[k],    row = r^-1/2,   col = (c / sum c)^-1/2

so that a linear [N, K] needs N + K numbers, and a distributed optimizer, whose ranks own ranges of
the moments, adds vectors over the data axis instead of gathering matrices. docs/measuring.md
compares it with the exact D.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_snip.collectives import sum_together
from megatron_snip.kernels import launch
from megatron_snip.statistics.optimizer_state import (
    AdamTerms,
    Shard,
    gradient_of,
    is_sharded,
    optimizer_shards,
)
from megatron_snip.topology import Axis, LinearKind, Placement, Topology

NUM_NORMS = 3
"""Numbers of one linear: |gradient|^2, |learning rate * update|^2, and how many gradients (of
weights and ranks) are in the first one."""


@dataclass(frozen=True)
class Sensitivity:
    """D of one weight's shard in factors, and the size of its update.

    Attributes:
        row: FP32 [N].
        col: FP32 [K].
        update_square: |update|^2 over all shards of the linear, > 0.
        step_square: |learning rate * update|^2 over all of them.
        num_replicas: how many data ranks hold each element of a sharded optimizer's state; more
            than 1 with `--num-distributed-optimizer-instances`.
    """

    row: Tensor
    col: Tensor
    update_square: float
    step_square: float
    num_replicas: int = 1


@torch.no_grad()
def own_sums(
    weights: Mapping[Placement, torch.nn.Parameter], optimizer: Any
) -> "dict[Placement, ShardSums]":
    """Return the sums of each weight over the moments that this rank has; exchanges nothing."""
    shards = optimizer_shards(optimizer)
    return {place: ShardSums.of(weight, shards.get(weight)) for place, weight in weights.items()}


@torch.no_grad()
def gather_sensitivities(
    weights: Mapping[Placement, torch.nn.Parameter],
    optimizer: Any,
    topology: Topology,
    sums: "dict[Placement, ShardSums] | None" = None,
) -> dict[Placement, Sensitivity]:
    """All ranks: return the sensitivity of each of this rank's weights.

    A weight without moments for all its elements (a first step, another optimizer) is left out.

    Args:
        weights: this rank's planned weights, [N, K] of the shard; the same linears in the same
            order on all ranks of an axis.
        optimizer: Megatron's.
        topology: this rank's place.
        sums: what `own_sums` returned, if no rank failed there; None calls it.

    Raises:
        RemoteFailure: on every rank, if one cannot read its moments.
    """
    if sums is None:
        read = partial(own_sums, weights, optimizer)
        sums = topology.control.attempt("reading the optimizer's state", read)
    sharded = is_sharded(optimizer)
    by_axes: dict[tuple[Axis, Axis], list[Placement]] = defaultdict(list)
    for placement in weights:
        data = topology.data_axis(placement) if sharded else Axis()
        by_axes[data, placement.tp].append(placement)
    for (data, tp), places in by_axes.items():
        _add([part for place in places for part in sums[place]], data.group)
        _add([part for place in places for part in sums[place].shared(place.kind)], tp.group)
    found = {}
    # One transfer from the device for all weights.
    numbers = torch.stack([s.scalars for s in sums.values()]).tolist() if sums else []
    for placement, (num_known, *squares) in zip(weights, numbers, strict=True):
        num_elements = placement.in_features * placement.out_features
        # Every data rank may hold a copy of the moments: they count once for each.
        num_replicas, num_left = divmod(int(num_known), num_elements)
        if num_replicas == 0 or num_left != 0:
            continue
        update_square, step_square = (square / num_replicas for square in squares)
        if not update_square > 0:
            continue
        rows, cols, _ = sums[placement]
        factor, _ = sums[placement].shared(placement.kind)
        rows = rows if num_replicas == 1 else rows / num_replicas
        row = rows.rsqrt().float()
        col = (cols / factor.sum()).rsqrt().float()
        found[placement] = Sensitivity(row, col, update_square, step_square, num_replicas)
    return found


@torch.no_grad()
def weight_norms(
    weights: Mapping[Placement, torch.nn.Parameter],
    optimizer: Any,
    sensitivities: Mapping[Placement, Sensitivity],
    topology: Topology,
    loss_scale: float,
) -> dict[str, Tensor]:
    """Return this rank's part of each linear's norms, FP64 [NUM_NORMS]; parts add over ranks.

    Args:
        weights: this rank's weights; their gradients are reduced over data ranks.
        optimizer: Megatron's; a rank counts the part of a weight whose state it has.
        sensitivities: D of the weights, with the size of each update and step.
        topology: this rank's place.
        loss_scale: the factor of the gradients; the norms are without it.
    """
    shards = optimizer_shards(optimizer)
    sharded = is_sharded(optimizer)
    found: dict[str, Tensor] = {}
    for placement, weight in weights.items():
        is_copy = placement.tp.size == 1 and placement.tp.rank != 0
        if is_copy:  # of a replicated weight, that counts on the first rank of the tensor axis
            continue
        rank = topology.data_axis(placement).rank
        shard = shards.get(weight)
        owns_part = shard is not None if sharded else rank == 0
        sensitivity = sensitivities.get(placement)
        parameter = weight if shard is None else shard.parameter
        grad = gradient_of(parameter)
        norms = torch.zeros(NUM_NORMS, dtype=torch.float64, device=weight.device)
        if grad is not None and owns_part:
            num_replicas = 1 if sensitivity is None else sensitivity.num_replicas
            norms[0] = _square(_owned_by(shard, grad)) / loss_scale**2 / num_replicas
            norms[2].fill_(1.0)  # an assignment would wait for the device
        is_first = rank == 0 and placement.tp.rank == 0
        if sensitivity is not None and is_first:  # `step_square` is that of the unsharded weight
            norms[1].fill_(sensitivity.step_square)
        found[placement.name] = norms + found.get(placement.name, 0.0)
    return found


def _owned_by(shard: Shard | None, tensor: Tensor) -> Tensor:
    """Return a shard's elements of a gradient, flat; all of them without a shard."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().reshape(-1)
    elements = slice(None) if shard is None else slice(shard.start, shard.end)
    return tensor.reshape(-1)[elements]


class ShardSums(NamedTuple):
    """Sums of 1 / D^2 over the elements whose moments are here, FP64.

    Attributes:
        rows: [N].
        cols: [K].
        scalars: [3], the number of elements that have moments, |update|^2 and
            |learning rate * update|^2.
    """

    rows: Tensor
    cols: Tensor
    scalars: Tensor

    @classmethod
    def of(cls, weight: torch.nn.Parameter, shard: Shard | None) -> Self:
        """Return the sums of a weight's shard on this rank; zeros without one."""
        num_rows, num_cols = weight.shape
        terms = None if shard is None else shard.adam_terms()
        if shard is not None and terms is not None and _reads_moments_once(terms):
            sums = launch.adam_sums(
                terms.first,
                terms.second,
                shard.start,
                (num_rows, num_cols),
                offset=terms.offset,
                factor=terms.factor,
                scale=terms.scale,
                learning_rate=shard.learning_rate,
            )
            return cls(*sums)
        new = partial(torch.zeros, dtype=torch.float64, device=weight.device)
        rows = new(num_rows)
        cols = new(num_cols)
        scalars = new(3)
        found = None if shard is None else shard.inverse_d_and_update()
        if shard is None or found is None:
            return cls(rows, cols, scalars)
        inverse_d, update = found
        scalars[0].fill_(shard.end - shard.start)  # an assignment would wait for the device
        scalars[1] = _square(update)
        scalars[2] = shard.learning_rate**2 * scalars[1]
        inverse = inverse_d.square_()
        # A shard is the end of a row, complete rows, and the beginning of a row. With rows of 4,
        # elements 6 to 12 are the end of row 1 (6, 7), row 2 (8 to 11), the beginning of row 3.
        num_head = min(-shard.start % num_cols, inverse.numel())
        num_tail = (inverse.numel() - num_head) % num_cols
        num_middle = inverse.numel() - num_head - num_tail
        at = shard.start
        for part in torch.split(inverse, [num_head, num_middle, num_tail]):
            if not part.numel():
                continue
            first, offset = divmod(at, num_cols)
            part = part.view(-1, min(num_cols, part.numel()))
            # FP32 sums, which PyTorch makes block by block: a relative error of about 1e-6.
            rows[first : first + part.shape[0]] += part.sum(1)
            cols[offset : offset + part.shape[1]] += part.sum(0)
            at += part.numel()
        return cls(rows, cols, scalars)

    def shared(self, kind: LinearKind) -> list[Tensor]:
        """Return the sums that must be added over the shards of a linear: a factor, the scalars.

        Column parallel shards divide the rows of W, so each has a part of every column's sum.
        """
        factor = self.cols if kind == "column" else self.rows
        return [factor, self.scalars]


def _reads_moments_once(terms: AdamTerms) -> bool:
    """Return whether kernels add up AdamW's moments; else PyTorch does, in many passes."""
    # Transformer Engine's FusedAdam may keep moments in a quantized tensor, a class of its own.
    are_plain = all(
        type(x) is Tensor and x.dtype in launch.MOMENT_DTYPES and x.is_contiguous()
        for x in (terms.first, terms.second)
    )
    return are_plain and launch.use_kernels(terms.second.device)


def _add(parts: list[Tensor], group: Any) -> None:
    """All ranks of a group: add tensors over it, in place, in one exchange."""
    if group is not None and parts:
        for part, total in zip(parts, sum_together(parts, group), strict=True):
            part.copy_(total)


def _square(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return norm.double().square()
