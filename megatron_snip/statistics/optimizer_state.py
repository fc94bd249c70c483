"""From this rank's part of an optimizer's state: sensitivity D, update direction, steps.

D is the derivative of the next update with respect to the gradient, element by element:

    AdamW       update = m^ / (sqrt(v^) + eps)   D = (1 - beta1) / (1 - beta1^t) / (sqrt(v^) + eps)
    momentum    update = m                       D = 1 - dampening, with Nesterov 1 + mu D
    Muon        update = orthogonalized m        D measured: one number for each weight

with t the next step. Only D / |update| is used, so factors of both are left out. Without such state
(first step, SGD, another optimizer) D = 1 and the gradient itself stands for the update. Megatron's
optimizers are recognized by their attributes:

    DistributedOptimizer              FP32 shards of flat ranges over the data axis
    Float16OptimizerWithFloat16Params full FP32 copies
    FP32Optimizer                     the parameters themselves
    ChainedOptimizer                  several of these, also chains
    LayerWiseDistributedOptimizer     a chain, with other parameters on each data rank
    any of them under FSDP            DTensors: rows or ranges over the data axis (sharded.py)

The step counter lives in the state (torch) or in the parameter group (Apex and Transformer
Engine's FusedAdam). sensitivity.py makes D of the model's weights from it.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_snip.log import warn_once_per_job
from megatron_snip.statistics.sharded import local, model_weight, own_elements

logger = logging.getLogger(__name__)

EIGENBASIS = frozenset({"GG", "Q_L"})
"""State of SOAP, in older and newer versions of its package. Its moments are those of the gradient
in another basis than the weight's."""

MUON_CHANGE = 0.01
"""Norm of the change from which Muon's D is measured, relative to the momentum's."""


class AdamTerms(NamedTuple):
    """What AdamW's D and update are made of, element by element.

        1 / D = offset + factor sqrt(second),    update = scale first D

    Attributes:
        first: first moments of the shard.
        second: second moments.
        offset: see above.
        factor: see above.
        scale: see above.
    """

    first: Tensor
    second: Tensor
    offset: float
    factor: float
    scale: float


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
        rule: Returns 1 / D and the update direction of a shard, FP32, or None before the first
            step.
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

    @property
    def learning_rate(self) -> float:
        """The learning rate of the parameter's group; 0 if it has none."""
        return float(self.group.get("lr") or 0.0)

    def adam_terms(self) -> AdamTerms | None:
        """Return the moments with their factors; None without moments of AdamW."""
        first = self.state.get("exp_avg")
        second = self.state.get("exp_avg_sq")
        step = self.step
        if self.rule is not _adam or first is None or second is None or step < 1:
            return None
        beta1, beta2 = self.group.get("betas", (0.0, 0.0))[:2]
        eps = float(self.group.get("eps", 0.0))
        factor = (1 - beta1 ** (step + 1)) / (1 - beta1)  # 1 / D = factor (sqrt(v^) + eps)
        return AdamTerms(
            first=first,
            second=second,
            offset=factor * eps,
            factor=factor / math.sqrt(1 - beta2**step),
            scale=factor / (1 - beta1**step),
        )

    def inverse_d_and_update(self) -> tuple[Tensor, Tensor] | None:
        """Return 1 / D and the update direction, [end - start] FP32 each; None without moments."""
        found = self.rule(self)
        if found is None:
            return None
        inverse_d, update = found
        device = self.parameter.device  # Megatron's --optimizer-cpu-offload has moments elsewhere
        return inverse_d.reshape(-1).to(device), update.reshape(-1).to(device)


def _adam(shard: Shard) -> tuple[Tensor, Tensor] | None:
    terms = shard.adam_terms()
    if terms is None:
        return None
    root = terms.second.float().sqrt()
    offset = root.new_full((), terms.offset)
    inverse_d = torch.add(offset, root, alpha=terms.factor, out=root)
    update = torch.div(terms.first.float(), inverse_d).mul_(terms.scale)
    return inverse_d, update


def _unknown(shard: Shard) -> None:
    """Return no moments: those that the shard has say nothing of its elements."""


def _momentum(shard: Shard) -> tuple[Tensor, Tensor]:
    m = shard.state["momentum_buffer"].float()
    group = shard.group
    d = 1.0 - group.get("dampening", 0.0)
    if group.get("nesterov"):
        d = 1.0 + group["momentum"] * d
    return torch.full_like(m, 1.0 / d if d else math.inf), m


def _muon(part_rows: Sequence[int], is_nesterov: bool, shard: Shard) -> tuple[Tensor, Tensor]:
    m = shard.state["momentum_buffer"].float().view(shard.shape)
    group = shard.group
    # A change of m as errors of wgrad are: random, larger where gradients are, as large as FP4's.
    generator = torch.Generator().manual_seed(m.numel())
    change = torch.randn(m.shape, generator=generator).to(m.device)
    change *= m.norm(dim=1).outer(m.norm(dim=0))
    change *= MUON_CHANGE * m.norm() / change.norm().clamp(min=1e-30)
    update = _orthogonalized_parts(m, part_rows)
    moved = _orthogonalized_parts(m + change, part_rows) - update
    # How much of a gradient's change reaches what is orthogonalized. The setting's name depends on
    # the package of the optimizer.
    beta = group.get("momentum", group.get("momentum_beta", 0.95))
    share = (1.0 - beta) * (1.0 + beta if is_nesterov else 1.0)
    d = share / float(change.norm() + 1e-30) * float(moved.norm())
    return torch.full_like(m, 1.0 / d if d else math.inf), update


def _muon_is_nesterov(inner: Any, group: Mapping[str, Any]) -> bool:
    """Return whether Muon looks ahead; where that is set depends on its package and version."""
    of_optimizer = getattr(inner, "nesterov", False)
    return bool(group.get("nesterov", group.get("use_nesterov", of_optimizer)))


def _muon_part_rows(inner: Any, parameter: Tensor) -> Sequence[int]:
    """Return the rows of what Megatron's Muon orthogonalizes one by one, in each query group.

    They are the queries, keys and values of a QKV weight, unless the job has
    `--muon-no-split-qkv`. Empty for other weights, and for other makes of Muon: they orthogonalize
    a weight as one matrix.
    """
    is_split = getattr(inner, "split_qkv", False) and inner.is_qkv_fn(parameter)
    if not is_split:
        return ()
    # Megatron 0.19 has them at the parameter as well, and prefers these.
    return tuple(getattr(parameter, "qkv_split_shapes", None) or inner.qkv_split_shapes)


def _orthogonalized_parts(x: Tensor, part_rows: Sequence[int]) -> Tensor:
    """Return `_orthogonalized` of a matrix, or of its parts (`_muon_part_rows`) one by one."""
    if not part_rows:
        return _orthogonalized(x)
    groups = x.view(-1, sum(part_rows), x.shape[1])
    parts = torch.split(groups, list(part_rows), dim=1)
    found = [_orthogonalized(part.flatten(0, 1)).view_as(part) for part in parts]
    return torch.cat(found, dim=1).view_as(x)


def _orthogonalized(x: Tensor) -> Tensor:
    """Return Muon's five Newton-Schulz steps (Jordan et al., 2024) of a matrix, FP32."""
    is_tall = x.shape[0] > x.shape[1]
    y: Tensor = x / x.norm().clamp(min=1e-7)
    y = y.t() if is_tall else y  # the smaller of the two Gram matrices
    for _ in range(5):
        gram = y @ y.t()
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.t() if is_tall else y


def optimizer_shards(optimizer: Any) -> dict[Tensor, Shard]:
    """Return this rank's shard of every model parameter that `optimizer` updates.

    Args:
        optimizer: a Megatron optimizer (possibly chained) or a torch optimizer.

    Returns:
        {model parameter: shard}; a parameter of which this rank owns nothing is absent.
    """
    shards: dict[Tensor, Shard] = {}
    for part in _parts(optimizer):
        inner = getattr(part, "optimizer", part)  # torch's, inside of Megatron's
        if inner is None:  # of a rank without trainable parameters
            continue
        groups = {id(p): group for group in inner.param_groups for p in group["params"]}
        for parameter, main_param, start, end in _owned(part, inner):
            group = groups.get(id(main_param))
            if group is None or start == end:
                continue
            state = {name: local(value) for name, value in inner.state.get(main_param, {}).items()}
            weight = model_weight(parameter)
            is_complete = end - start == weight.numel()
            rule = _rule(inner, main_param, state, group, weight.shape, is_complete)
            shards[weight] = Shard(start, end, parameter, weight.shape, state, group, rule)
    return shards


def steps_of_moments(optimizer: Any) -> int | None:
    """Return the fewest steps that AdamW's moments on this rank have seen; None without AdamW."""
    shards = optimizer_shards(optimizer).values()
    steps = []
    for shard in shards:
        has_moments = any(shard.group.get("betas", ()))  # an unknown optimizer has the rule alone
        if shard.rule is _adam and has_moments:
            steps.append(shard.step)
    return min(steps, default=None)


def learning_rate(optimizer: Any) -> float | None:
    """Return the largest learning rate of this rank's parameter groups; None without any."""
    groups = getattr(optimizer, "param_groups", None) or []
    rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
    return max(rates, default=None)


def is_sharded(optimizer: Any) -> bool:
    """Whether state is split over the data axis (Megatron's distributed optimizers)."""
    if getattr(optimizer, "dp_cp_params_list", None) is not None:
        return True  # each data rank owns other weights
    chained = _chained(optimizer)
    if chained is not None:
        return any(map(is_sharded, chained))
    if hasattr(optimizer, "_get_model_param_range_map"):
        return True
    groups = getattr(optimizer, "param_groups", ())
    return any(isinstance(p, DTensor) for group in groups for p in group["params"])


def _parts(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that Megatron chains, perhaps none, or the only one.

    A chain may hold another one: from 0.18 on Megatron chains its LayerWiseDistributedOptimizer
    (`--optimizer muon --use-distributed-optimizer`) with the optimizer of the other parameters.
    """
    chained = _chained(optimizer)
    if chained is None:
        yield optimizer
        return
    for each in chained:
        yield from _parts(each)


def _chained(optimizer: Any) -> Sequence[Any] | None:
    chained: Sequence[Any] | None = getattr(optimizer, "chained_optimizers", None)
    return chained


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
    main_param: Tensor,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    shape: torch.Size,
    is_complete: bool,
) -> Callable[[Shard], Any]:
    """Return the rule of the optimizer that made a shard's state; AdamW's if it is not known.

    Args:
        inner: torch's optimizer.
        main_param: the parameter that it steps.
        state: the shard's state; an optimizer is known by what its state holds.
        group: settings of the parameter's group.
        shape: shape of the complete parameter.
        is_complete: whether the shard is all of the parameter.
    """
    known = {name for name, value in state.items() if value is not None}
    is_matrix = len(shape) == 2
    if is_matrix and is_complete and "momentum_buffer" in known:
        is_muon = hasattr(inner, "orthogonalize") or "ns_steps" in group
        if not is_muon:
            return _momentum
        part_rows = _muon_part_rows(inner, main_param)
        return partial(_muon, part_rows, _muon_is_nesterov(inner, group))
    in_eigenbasis = not known.isdisjoint(EIGENBASIS)
    is_unknown = bool(known - {"step"}) and ("exp_avg_sq" not in known or in_eigenbasis)
    if is_matrix and is_unknown:
        warn_once_per_job(
            logger,
            f"snip: the state of the optimizer {type(inner).__name__} is not known (AdamW's is; "
            "those of Muon and momentum are where a rank holds a complete weight), so "
            "gradients stand for its updates",
        )
    return _unknown if in_eigenbasis else _adam


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
