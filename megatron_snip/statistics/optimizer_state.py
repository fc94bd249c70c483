"""Reading AdamW's moments: how strongly each weight's next update depends on its gradient.

    update(g) = m^(g) / (sqrt(v^) + eps)
    D = |d update / d g| = (1 - beta1) / (1 - beta1^t) / (sqrt(v^) + eps)     (leading term)

with t the step about to be taken. Where there are no moments yet (first step, SGD) D = 1 and the
gradient itself stands for the update. Megatron's optimizers are recognized by their attributes:

    DistributedOptimizer              FP32 shards of flat ranges over the data axis
    Float16OptimizerWithFloat16Params full FP32 copies
    FP32Optimizer                     the parameters themselves
    ChainedOptimizer                  several of these

The step counter lives in the state (torch) or in the parameter group (Apex and Transformer
Engine's FusedAdam).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch


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


def adam_shards(optimizer: Any) -> dict[torch.Tensor, AdamShard]:
    """Return this rank's shard of every model parameter that `optimizer` updates.

    Args:
        optimizer: a Megatron optimizer (possibly chained) or a torch optimizer.

    Returns:
        {model parameter: shard}; a parameter of which this rank owns nothing is absent.
    """
    shards: dict[torch.Tensor, AdamShard] = {}
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(part, "optimizer", part)
        groups = {id(p): group for group in inner.param_groups for p in group["params"]}
        for model_param, main_param, start, end in _owned(part, inner):
            if id(main_param) in groups:
                state = inner.state.get(main_param, {})
                shards[model_param] = _shard(state, groups[id(main_param)], start, end)
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
    """Whether moments are split over the data axis (Megatron's distributed optimizer)."""
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


def _shard(state: dict[str, Any], group: dict[str, Any], start: int, end: int) -> AdamShard:
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
