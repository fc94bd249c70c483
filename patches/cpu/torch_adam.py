"""Checkpoints of a distributed optimizer that runs torch's AdamW.

Without Transformer Engine and Apex, Megatron falls back to torch's AdamW, which keeps its step
count beside each parameter's moments and has no state before its first step. Megatron's distributed
optimizer loses both when it loads, or fails. The CPU layer installs these wrappers; on GPUs the
trainer does.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Return (owner, attribute, new value) for Megatron-Core; none where TE or Apex is."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    owner = distrib_optimizer.DistributedOptimizer
    states = "_set_main_param_and_optimizer_states"
    yield owner, "state_dict", _state_dict_before_first_step(owner.state_dict)
    yield owner, "load_state_dict", _load_with_own_steps(owner.load_state_dict)
    yield owner, states, _set_but_keep_step(getattr(owner, states))


@functools.cache
def install() -> None:
    """Install the wrappers for the rest of this process; a second call changes nothing."""
    for owner, name, value in replacements():
        setattr(owner, name, value)


def _state_dict_before_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedOptimizer.state_dict` for an optimizer that has not stepped yet.

    torch's AdamW makes its state at the first step, and Megatron asserts that there is one; a
    state of step 0 and zero moments is what that first step would make.
    """

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if inner is not None and not inner.state:
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return original(self)

    return state_dict


def _load_with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedOptimizer.load_state_dict` so that it restores AdamW's step count.

    Depending on its version Megatron leaves it at 0 (wrong bias correction) or gives one tensor
    to all parameters, which torch's AdamW then increments once per parameter.
    """

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        # Megatron-FSDP's state has no such groups, and each parameter's step beside its moments.
        groups = state_dict.get("optimizer", {}).get("param_groups", ())
        steps = {float(g["step"]) for g in groups if "step" in g}
        result = original(self, state_dict)
        if len(steps) == 1:
            (step,) = steps
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(step)
        return result

    return load_state_dict


def _set_but_keep_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedOptimizer._set_main_param_and_optimizer_states` for tensors without `step`.

    It copies every entry of an optimizer's state. torch's AdamW has one more, `step`, which the
    fully reshardable format stores in another place.
    """

    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: Any) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        own = {"step": state["step"]} if "step" in state else {}
        return original(self, model_param, {**own, **tensors})

    return set_states
