"""From an optimizer's state: sensitivity D (of the next update to the gradient), norms, steps.

    AdamW       update = m^ / (sqrt(v^) + eps)   D = (1 - beta1) / (1 - beta1^t) / (sqrt(v^) + eps)
    momentum    update = m                       D = 1 - dampening, with Nesterov 1 + mu D
    Adafactor   update of RMS 1                  D = 1 / sqrt(v), v in factors
    Muon        update = orthogonalized m        D measured: one number for each weight

with t the next step. Only D / |update| is used, so factors of both are left out. Without such state
(first step, SGD, another optimizer) D = 1 and the gradient itself stands for the update. Megatron's
optimizers are recognized by their attributes:

    DistributedOptimizer              FP32 shards of flat ranges over the data axis
    Float16OptimizerWithFloat16Params full FP32 copies
    FP32Optimizer                     the parameters themselves
    ChainedOptimizer                  several of these
    LayerWiseDistributedOptimizer     several of these, with other parameters on each data rank
    any of them under FSDP            DTensors: rows or ranges over the data axis (sharded.py)

The step counter lives in the state (torch) or in the parameter group (Apex and Transformer
Engine's FusedAdam).

Statistics use D in factors. As in Adafactor (Shazeer and Stern, arXiv:1804.04235),
1 / D^2 is approximated by the outer product of its row sums and column sums over their total,

    D[n, k] = row[n] col[k],    row = r^-1/2,   col = (c / sum c)^-1/2

so that a linear [N, K] needs N + K numbers, and a distributed optimizer, whose ranks own ranges of
the moments, adds vectors over the data axis instead of gathering matrices. docs/measuring.md
compares it with the exact D.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_snip.collectives import attempt, sum_together
from megatron_snip.log import warn_once_per_job
from megatron_snip.quantizers.stored import high_precision
from megatron_snip.statistics.sharded import local, model_weight, own_elements
from megatron_snip.topology import Axis, LinearKind, Placement, Topology

logger = logging.getLogger(__name__)

FACTORS = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))
"""State of Adafactor's second moments, in PyTorch and in Transformers and fairseq."""

MUON_CHANGE = 0.01
"""Norm of the change from which Muon's D is measured, relative to the momentum's."""

NORMS = 3
"""Numbers of one linear: |gradient|^2, |W|^2 and |learning rate * update|^2."""


@dataclass(frozen=True)
class Shard:
    """Elements [start, end) of one flattened parameter, and their optimizer state.

    Attributes:
        start: First element of the flattened parameter.
        end: One past the last element.
        parameter: The tensor that holds the weight between iterations, and its gradient.
        shape: Shape of the complete parameter.
        state: The optimizer's state, such as `exp_avg`, `exp_avg_sq` and `step`.
        group: The settings of the parameter's group.
        rule: Returns D and the update direction of a shard, FP32, or None before the first step.
    """

    start: int
    end: int
    parameter: Tensor
    shape: torch.Size
    state: Mapping[str, Any]
    group: Mapping[str, Any]
    rule: Callable[..., tuple[Tensor, Tensor] | None]

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        step = self.state.get("step", self.group.get("step", 0))
        return int(step.item() if isinstance(step, Tensor) else step or 0)

    def slope_and_update(self) -> tuple[Tensor, Tensor] | None:
        """Return D and the update direction, [end - start] FP32 each; None without moments."""
        found = self.rule(self)
        return None if found is None else (found[0].reshape(-1), found[1].reshape(-1))


def _adam(shard: Shard) -> tuple[Tensor, Tensor] | None:
    first = shard.state.get("exp_avg")
    second = shard.state.get("exp_avg_sq")
    step = shard.step
    if first is None or second is None or step < 1:
        return None
    beta1, beta2 = shard.group.get("betas", (0.0, 0.0))[:2]
    root = (second.float() / (1 - beta2**step)).sqrt_().add_(float(shard.group.get("eps", 0.0)))
    update = (first.float() / (1 - beta1**step)).div_(root)
    return root.reciprocal_().mul_((1 - beta1) / (1 - beta1 ** (step + 1))), update


def _adafactor(names: tuple[str, str], shard: Shard) -> tuple[Tensor, Tensor]:
    rows, cols = (shard.state[name].float() for name in names)
    rows = rows.reshape(-1, 1)
    cols = cols.reshape(1, -1)
    d = (rows / rows.mean()).rsqrt() * cols.rsqrt()
    return d, torch.ones_like(d)


def _momentum(shard: Shard) -> tuple[Tensor, Tensor]:
    m = shard.state["momentum_buffer"].float()
    group = shard.group
    d = 1.0 - group.get("dampening", 0.0)
    return torch.full_like(m, 1.0 + group["momentum"] * d if group.get("nesterov") else d), m


def _muon(shard: Shard) -> tuple[Tensor, Tensor]:
    m = shard.state["momentum_buffer"].float().view(shard.shape)
    group = shard.group
    # As errors of wgrad are: random, larger where gradients are, and of the size of FP4's.
    change = torch.randn(m.shape, generator=torch.Generator().manual_seed(m.numel())).to(m.device)
    change *= m.norm(dim=1).outer(m.norm(dim=0))
    change *= MUON_CHANGE * m.norm() / change.norm().clamp(min=1e-30)
    update = _orthogonalized(m)
    beta = group.get("momentum", group.get("momentum_beta", 0.95))
    is_nesterov = group.get("nesterov", group.get("use_nesterov", False))
    slope = (1.0 - beta) * (1.0 + beta if is_nesterov else 1.0) / float(change.norm() + 1e-30)
    moved = _orthogonalized(m + change) - update
    return torch.full_like(m, slope * float(moved.norm())), update


def _orthogonalized(x: Tensor) -> Tensor:
    """Return Muon's five Newton-Schulz steps (Jordan et al., 2024) of a matrix, FP32."""
    y: Tensor = x / x.norm().clamp(min=1e-7)
    y = y.t() if x.shape[0] > x.shape[1] else y
    for _ in range(5):
        gram = y @ y.t()
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.t() if x.shape[0] > x.shape[1] else y


def optimizer_shards(optimizer: Any) -> dict[Tensor, Shard]:
    """Return this rank's shard of every model parameter that `optimizer` updates.

    Args:
        optimizer: a Megatron optimizer (possibly chained) or a torch optimizer.

    Returns:
        {model parameter: shard}; a parameter of which this rank owns nothing is absent.
    """
    shards: dict[Tensor, Shard] = {}
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(part, "optimizer", part)
        groups = {id(p): group for group in inner.param_groups for p in group["params"]}
        for parameter, main_param, start, end in _owned(part, inner):
            group = groups.get(id(main_param))
            if group is None or start == end:
                continue
            state = {name: local(value) for name, value in inner.state.get(main_param, {}).items()}
            weight = model_weight(parameter)
            rule = _rule(inner, state, group, weight.shape, end - start == weight.numel())
            shards[weight] = Shard(start, end, parameter, weight.shape, state, group, rule)
    return shards


def steps_of_moments(optimizer: Any) -> int | None:
    """Return the fewest steps that AdamW's moments on this rank have seen; None without AdamW."""
    shards = optimizer_shards(optimizer).values()
    adam = (shard for shard in shards if shard.rule is _adam and any(shard.group.get("betas", ())))
    return min((shard.step for shard in adam), default=None)


def learning_rate(optimizer: Any) -> float | None:
    """Return the largest learning rate of this rank's parameter groups; None without any."""
    groups = getattr(optimizer, "param_groups", None) or []
    rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
    return max(rates, default=None)


def is_sharded(optimizer: Any) -> bool:
    """Whether state is split over the data axis (Megatron's distributed optimizers)."""
    if getattr(optimizer, "dp_cp_params_list", None) is not None:
        return True  # each data rank owns other weights
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    if any(hasattr(part, "_get_model_param_range_map") for part in parts):
        return True
    groups = chain(*(getattr(part, "param_groups", ()) for part in parts))
    return any(isinstance(p, DTensor) for group in groups for p in group["params"])


def _owned(part: Any, inner: Any) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Yield (model parameter, parameter that the inner optimizer steps, start, end)."""
    if hasattr(part, "model_param_group_index_map"):
        for model_param, (group, order) in part.model_param_group_index_map.items():
            owned = part._get_model_param_range_map(model_param)["param"]
            main_param = inner.param_groups[group]["params"][order]
            yield model_param, main_param, owned.start, owned.end
    elif hasattr(part, "float16_groups"):
        pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        for model_group, main_group in pairs:
            for model_param, main_param in zip(model_group, main_group, strict=True):
                yield model_param, main_param, *own_elements(model_param)
        for param in chain(*part.fp32_from_fp32_groups):
            yield param, param, *own_elements(param)
    else:
        for param in chain(*(group["params"] for group in inner.param_groups)):
            yield param, param, *own_elements(param)


def _rule(
    inner: Any,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    shape: torch.Size,
    is_complete: bool,
) -> Callable[[Shard], Any]:
    """Return the rule of the optimizer that made a shard's state; AdamW's if it is not known."""
    known = {name for name, value in state.items() if value is not None}
    is_matrix = len(shape) == 2
    if is_matrix and is_complete:
        for names in FACTORS:
            if known.issuperset(names):
                return partial(_adafactor, names)
        if "momentum_buffer" in known:
            is_muon = hasattr(inner, "orthogonalize") or "ns_steps" in group
            return _muon if is_muon else _momentum
    if is_matrix and known - {"step"} and "exp_avg_sq" not in known:
        warn_once_per_job(
            logger,
            f"snip: the state of the optimizer {type(inner).__name__} is not known (AdamW's is; "
            "those of Adafactor, Muon and momentum are where a rank holds a complete weight), so "
            "gradients stand for its updates",
        )
    return _adam


@dataclass(frozen=True)
class Sensitivity:
    """D of one weight's shard, and the size of its update.

    Attributes:
        row: FP32 [N].
        col: FP32 [K].
        update_square: |update|^2 over all shards of the linear, > 0.
        num_replicas: how many data ranks hold each element of a sharded optimizer's state; more
            than 1 with `--num-distributed-optimizer-instances`.
    """

    row: Tensor
    col: Tensor
    update_square: float
    num_replicas: int = 1


@torch.no_grad()
def gather_sensitivities(
    weights: Mapping[Placement, torch.nn.Parameter], optimizer: Any, topology: Topology
) -> dict[Placement, Sensitivity]:
    """All ranks: return the sensitivity of each of this rank's weights.

    A weight without moments for all its elements (a first step, another optimizer) is left out.

    Args:
        weights: this rank's planned weights, [N, K] of the shard; the same linears in the same
            order on all ranks of an axis.
        optimizer: Megatron's.
        topology: this rank's place.

    Raises:
        RemoteFailure: on every rank, if one cannot read its moments.
    """

    def own_sums() -> dict[Placement, ShardSums]:
        shards = optimizer_shards(optimizer)
        return {place: ShardSums.of(w, shards.get(w)) for place, w in weights.items()}

    sums = attempt("reading the optimizer's state", own_sums, topology.control)
    sharded = is_sharded(optimizer)
    by_axes: dict[tuple[Axis, Axis], list[Placement]] = defaultdict(list)
    for placement in weights:
        data = topology.data_axis(placement) if sharded else Axis()
        by_axes[data, placement.tensor].append(placement)
    for (data, tensor), places in by_axes.items():
        _add([part for place in places for part in sums[place]], data.group)
        _add([part for place in places for part in sums[place].shared(place.kind)], tensor.group)
    found = {}
    numbers = torch.stack([s.scalars for s in sums.values()]).tolist() if sums else []
    for placement, (known, square) in zip(weights, numbers, strict=True):
        num_elements = placement.in_features * placement.out_features
        if known > 0 and known % num_elements == 0 and square > 0:
            num_replicas = int(known) // num_elements
            rows, cols, _ = sums[placement]
            total = sums[placement].shared(placement.kind)[0].sum()
            row = (rows / num_replicas).rsqrt().float()
            col = (cols / total).rsqrt().float()
            found[placement] = Sensitivity(row, col, square / num_replicas, num_replicas)
    return found


@torch.no_grad()
def weight_norms(
    weights: Mapping[Placement, torch.nn.Parameter],
    optimizer: Any,
    sensitivities: Mapping[Placement, Sensitivity],
    topology: Topology,
    loss_scale: float,
) -> dict[str, Tensor]:
    """Return this rank's part of each linear's norms, FP64 [NORMS]; parts add over ranks.

    Args:
        weights: this rank's; their gradients are reduced over data ranks.
        optimizer: Megatron's; what it owns of a weight is counted.
        sensitivities: of the weights; they hold the size of the update.
        topology: this rank's place.
        loss_scale: factor of the gradients; the norms are without it.
    """
    shards = optimizer_shards(optimizer)
    sharded = is_sharded(optimizer)
    rate = learning_rate(optimizer) or 0.0
    found: dict[str, Tensor] = {}
    for placement, weight in weights.items():
        rank = topology.data_axis(placement).rank
        shard = shards.get(weight)
        if placement.tensor.size == 1 and placement.tensor.rank:  # a replicated weight
            continue
        sensitivity = sensitivities.get(placement)
        parameter = weight if shard is None else shard.parameter
        grad = gradient_of(parameter)
        norms = torch.zeros(NORMS, dtype=torch.float64, device=weight.device)
        if grad is not None and (shard is not None if sharded else rank == 0):
            num_replicas = 1 if sensitivity is None else sensitivity.num_replicas
            norms[0] = _square(_owned_by(shard, grad)) / loss_scale**2 / num_replicas
            norms[1] = _square(_owned_by(shard, high_precision(parameter))) / num_replicas
        if sensitivity is not None and rank == placement.tensor.rank == 0:
            norms[2] = rate**2 * sensitivity.update_square
        found[placement.name] = norms + found.get(placement.name, 0.0)
    return found


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient between backward and optimizer step; under FSDP a DTensor.

    It is Megatron's `main_grad` where DDP made one, `decoupled_grad` where Megatron-FSDP did, else
    autograd's.
    """
    for name in ("main_grad", "decoupled_grad"):
        found: Tensor | None = getattr(parameter, name, None)
        if found is not None:
            return found
    return parameter.grad


def _owned_by(shard: Shard | None, tensor: Tensor) -> Tensor:
    """Return a shard's elements of a weight or gradient, flat; all of them without a shard."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().reshape(-1)
    return tensor.reshape(-1)[slice(None) if shard is None else slice(shard.start, shard.end)]


class ShardSums(NamedTuple):
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
    def of(cls, weight: torch.nn.Parameter, shard: Shard | None) -> Self:
        """Return the sums of a weight's shard on this rank; zeros without one."""
        num_rows, num_cols = weight.shape
        new = partial(torch.zeros, dtype=torch.float64, device=weight.device)
        rows = new(num_rows)
        cols = new(num_cols)
        scalars = new(2)
        if shard is not None and (found := shard.slope_and_update()) is not None:
            d, update = found
            scalars[0] = shard.end - shard.start
            scalars[1] = _square(update)
            inverse = d.square_().reciprocal_()
            if not inverse.is_cuda:  # each of the CPU's FP64 sums would convert it again
                inverse = inverse.double()
            # A shard is the end of a row, complete rows, and the beginning of a row.
            head = min(-shard.start % num_cols, inverse.numel())
            tail = (inverse.numel() - head) % num_cols
            at = shard.start
            for part in torch.split(inverse, [head, inverse.numel() - head - tail, tail]):
                if not part.numel():
                    continue
                first, offset = divmod(at, num_cols)
                part = part.view(-1, min(num_cols, part.numel()))
                rows[first : first + part.shape[0]] += part.sum(1, dtype=torch.float64)
                cols[offset : offset + part.shape[1]] += part.sum(0, dtype=torch.float64)
                at += part.numel()
        return cls(rows, cols, scalars)

    def shared(self, kind: LinearKind) -> list[Tensor]:
        """Return the sums that must be added over the shards of a linear."""
        return [self.cols if kind == "column" else self.rows, self.scalars]


def _add(parts: list[Tensor], group: Any) -> None:
    """All ranks of a group: add tensors over it, in place, in one exchange."""
    if group is not None and parts:
        for part, total in zip(parts, sum_together(parts, group), strict=True):
            part.copy_(total)


def _square(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return norm.double().square()
