"""Reading an optimizer's state: how strongly each weight's next update depends on its gradient.

    AdamW       update = m^ / (sqrt(v^) + eps)   D = (1 - beta1) / (1 - beta1^t) / (sqrt(v^) + eps)
    momentum    update = m                       D = 1 - dampening, with Nesterov 1 + mu D
    Adafactor   update of RMS 1                  D = 1 / sqrt(v), v in factors
    Muon        update = orthogonalized m        D measured: one number for each weight

with t the step about to be taken. Only D / |update| counts, so factors of both are left out. Where
there is nothing of the kind (first step, SGD, another optimizer) D = 1 and the gradient itself
stands for the update. Megatron's optimizers are recognized by their attributes:

    DistributedOptimizer              FP32 shards of flat ranges over the data axis
    Float16OptimizerWithFloat16Params full FP32 copies
    FP32Optimizer                     the parameters themselves
    ChainedOptimizer                  several of these
    LayerWiseDistributedOptimizer     several of these, with other parameters on each data rank

The step counter lives in the state (torch) or in the parameter group (Apex and Transformer
Engine's FusedAdam).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from megatron_snip.log import warn_once_per_job

logger = logging.getLogger(__name__)

FACTORS = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))
"""Where Adafactor has its second moments: PyTorch's, and that of Transformers and fairseq."""

MUON_CHANGE = 0.01
"""Size of the change from which Muon's D is measured, over the momentum's."""


@dataclass(frozen=True)
class Shard:
    """Elements [start, end) of one flattened parameter, and what the optimizer keeps of them.

    Attributes:
        start: first element of the flattened parameter.
        end: one past the last.
        shape: of the parameter.
        state: the optimizer's, e.g. `exp_avg`, `exp_avg_sq` and `step`.
        group: the settings of the parameter's group.
        rule: returns D and the update direction of a shard, FP32, or None before the first step.
    """

    start: int
    end: int
    shape: torch.Size
    state: Mapping[str, Any]
    group: Mapping[str, Any]
    rule: Callable[[Shard], tuple[torch.Tensor, torch.Tensor] | None]

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        step = self.state.get("step", self.group.get("step", 0))
        return int(step.item() if isinstance(step, torch.Tensor) else step or 0)

    def slope_and_update(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return D and the update direction, [end - start] FP32 each; None without moments."""
        found = self.rule(self)
        return None if found is None else (found[0].reshape(-1), found[1].reshape(-1))


def _adam(shard: Shard) -> tuple[torch.Tensor, torch.Tensor] | None:
    first, second, step = shard.state.get("exp_avg"), shard.state.get("exp_avg_sq"), shard.step
    if first is None or second is None or step < 1:
        return None
    beta1, beta2 = shard.group.get("betas", (0.0, 0.0))[:2]
    root = (second.float() / (1 - beta2**step)).sqrt_().add_(float(shard.group.get("eps", 0.0)))
    update = first.float() / (1 - beta1**step) / root
    return root.reciprocal_().mul_((1 - beta1) / (1 - beta1 ** (step + 1))), update


def _adafactor(names: tuple[str, str], shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = (shard.state[name].float() for name in names)
    rows, cols = rows.reshape(-1, 1), cols.reshape(1, -1)
    d = (rows / rows.mean()).rsqrt() * cols.rsqrt()
    return d, torch.ones_like(d)


def _momentum(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    m, group = shard.state["momentum_buffer"].float(), shard.group
    d = 1.0 - group.get("dampening", 0.0)
    return torch.full_like(m, 1.0 + group["momentum"] * d if group.get("nesterov") else d), m


def _muon(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    m, group = shard.state["momentum_buffer"].float().view(shard.shape), shard.group
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


def _orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """Return Muon's five Newton-Schulz steps (Jordan et al., 2024) of a matrix, FP32."""
    y: torch.Tensor = x / x.norm().clamp(min=1e-7)
    y = y.t() if x.shape[0] > x.shape[1] else y
    for _ in range(5):
        gram = y @ y.t()
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.t() if x.shape[0] > x.shape[1] else y


def optimizer_shards(optimizer: Any) -> dict[torch.Tensor, Shard]:
    """Return this rank's shard of every model parameter that `optimizer` updates.

    Args:
        optimizer: a Megatron optimizer (possibly chained) or a torch optimizer.

    Returns:
        {model parameter: shard}; a parameter of which this rank owns nothing is absent.
    """
    shards: dict[torch.Tensor, Shard] = {}
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(part, "optimizer", part)
        groups = {id(p): group for group in inner.param_groups for p in group["params"]}
        for weight, main_param, start, end in _owned(part, inner):
            if (group := groups.get(id(main_param))) is not None:
                state, shape = inner.state.get(main_param, {}), weight.shape
                rule = _rule(inner, state, group, shape, end - start == weight.numel())
                shards[weight] = Shard(start, end, shape, state, group, rule)
    return shards


def steps_of_moments(optimizer: Any) -> int | None:
    """Return the fewest steps that AdamW's moments on this rank have seen; None without AdamW."""
    shards = optimizer_shards(optimizer).values()
    adam = (shard for shard in shards if shard.rule is _adam and any(shard.group.get("betas", ())))
    return min((shard.step for shard in adam), default=None)


def learning_rate(optimizer: Any) -> float | None:
    """Return the largest of the parameter groups that this rank holds, or None."""
    groups = getattr(optimizer, "param_groups", None) or []
    rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
    return max(rates, default=None)


def is_sharded(optimizer: Any) -> bool:
    """Whether state is split over the data axis (Megatron's distributed optimizers)."""
    if getattr(optimizer, "dp_cp_params_list", None) is not None:
        return True  # each data rank owns other weights
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return any(hasattr(part, "_get_model_param_range_map") for part in parts)


def _owned(part: Any, inner: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Yield (model parameter, parameter that the inner optimizer steps, start, end)."""
    if hasattr(part, "_get_model_param_range_map"):
        for model_param, (group, order) in part.model_param_group_index_map.items():
            owned = part._get_model_param_range_map(model_param)["param"]
            main_param = inner.param_groups[group]["params"][order]
            yield model_param, main_param, owned.start, owned.end
    elif hasattr(part, "float16_groups"):
        pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        for model_group, main_group in pairs:
            for model_param, main_param in zip(model_group, main_group, strict=True):
                yield model_param, main_param, 0, model_param.numel()
        for param in chain(*part.fp32_from_fp32_groups):
            yield param, param, 0, param.numel()
    else:
        for param in chain(*(group["params"] for group in inner.param_groups)):
            yield param, param, 0, param.numel()


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
            f"snip: the state of the optimizer {type(inner).__name__} is not known (AdamW, "
            "Adafactor, Muon and momentum are), so gradients stand for its updates",
        )
    return _adam
