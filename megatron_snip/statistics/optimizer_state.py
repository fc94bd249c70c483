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
class AdamShard:
    """The moments of elements [start, end) of one flattened parameter.

    Attributes:
        start: first element of the flattened parameter.
        end: one past the last.
        exp_avg: [end - start], first moment, or None before the first step.
        exp_avg_sq: likewise, second moment.
        step: optimizer steps taken so far.
        betas: decay rates of the moments.
        eps: AdamW's epsilon.
    """

    start: int
    end: int
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    step: int
    betas: tuple[float, float]
    eps: float

    def sensitivity(self) -> torch.Tensor | None:
        """Return D for these elements, [end - start] FP32, or None where there are no moments."""
        beta1, root = self.betas[0], self._denominator()
        factor = (1 - beta1) / (1 - beta1 ** (self.step + 1))
        return None if root is None else root.reciprocal_().mul_(factor)

    def update(self) -> torch.Tensor | None:
        """Return the update direction m^ / (sqrt(v^) + eps), [end - start] FP32, or None."""
        root = self._denominator()
        if root is None or self.exp_avg is None:
            return None
        return self.exp_avg.reshape(-1).float() / (1 - self.betas[0] ** self.step) / root

    def _denominator(self) -> torch.Tensor | None:
        if self.exp_avg_sq is None or self.step < 1:
            return None
        second = self.exp_avg_sq.reshape(-1).float() / (1 - self.betas[1] ** self.step)
        return second.sqrt_().add_(self.eps)


@dataclass(frozen=True)
class OtherShard:
    """The state of one complete parameter under momentum, Adafactor or Muon; see AdamShard.

    Attributes:
        start, end, step, betas: as of AdamShard; there are no moments that must age.
        slope_and_update: returns D and the update direction, both [N, K] FP32.
    """

    start: int
    end: int
    slope_and_update: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    step: int = 0
    betas: tuple[float, float] = (0.0, 0.0)

    def sensitivity(self) -> torch.Tensor:
        """Return D for these elements, [end - start] FP32."""
        return self.slope_and_update()[0].reshape(-1)

    def update(self) -> torch.Tensor:
        """Return the update direction, [end - start] FP32."""
        return self.slope_and_update()[1].reshape(-1)


def _adafactor(rows: torch.Tensor, cols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = rows.float().reshape(-1, 1), cols.float().reshape(1, -1)
    d = (rows / rows.mean()).rsqrt() * cols.rsqrt()
    return d, torch.ones_like(d)


def _momentum(m: torch.Tensor, group: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    d = 1.0 - group.get("dampening", 0.0)
    return torch.full_like(m, 1.0 + group["momentum"] * d if group.get("nesterov") else d), m


def _muon(m: torch.Tensor, group: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
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


Shard = AdamShard | OtherShard


def adam_shards(optimizer: Any) -> dict[torch.Tensor, Shard]:
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
        for model_param, main_param, start, end in _owned(part, inner):
            if id(main_param) in groups:
                state = inner.state.get(main_param, {})
                group = groups[id(main_param)]
                shards[model_param] = _shard(state, group, model_param, start, end, inner)
    return shards


def steps_of_moments(optimizer: Any) -> int | None:
    """Return the fewest steps that AdamW's moments on this rank have seen; None without AdamW."""
    shards = adam_shards(optimizer).values()
    return min((shard.step for shard in shards if any(shard.betas)), default=None)


def learning_rate(optimizer: Any) -> float | None:
    """Return the largest over parameter groups that this rank holds, or None."""
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


def _shard(
    state: dict[str, Any],
    group: dict[str, Any],
    weight: torch.Tensor,
    start: int,
    end: int,
    inner: Any,
) -> Shard:
    known = {name for name, value in state.items() if value is not None}
    is_matrix = weight.dim() == 2 and end - start == weight.numel()
    factors = next((names for names in FACTORS if known.issuperset(names)), None)
    if is_matrix and factors is not None:
        return OtherShard(start, end, partial(_adafactor, *(state[name] for name in factors)))
    if is_matrix and "momentum_buffer" in known:
        find = _muon if hasattr(inner, "orthogonalize") or "ns_steps" in group else _momentum
        m = state["momentum_buffer"].float().view(weight.shape)
        return OtherShard(start, end, partial(find, m, group))
    if weight.dim() == 2 and known - {"step"} and "exp_avg_sq" not in known:
        warn_once_per_job(
            logger,
            f"snip: the state of the optimizer {type(inner).__name__} is not known (AdamW, "
            "Adafactor, Muon and momentum are), so gradients stand for its updates",
        )
    step = state.get("step", group.get("step", 0))
    return AdamShard(
        start=start,
        end=end,
        exp_avg=state.get("exp_avg"),
        exp_avg_sq=state.get("exp_avg_sq"),
        step=int(step.item() if isinstance(step, torch.Tensor) else step or 0),
        betas=tuple(group.get("betas", (0.0, 0.0))),
        eps=float(group.get("eps", 0.0)),
    )
