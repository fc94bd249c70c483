"""Delayed scaling's state in a Transformer Engine linear.

The scales of X, W and G come from the largest magnitudes of earlier microbatches. The state is kept
while a plan gives the linear another recipe, and put back when it runs delayed scaling again.
"""

from typing import Any

import torch
from torch import Tensor

_KEYS = ("scaling_fwd", "scaling_bwd")
_KEPT = "_snip_delayed_scaling"
_FORWARD_TENSORS = 3
"""Tensors of a GEMM that have a scale in the forward: input, weight, output."""
_BACKWARD_TENSORS = 2
"""The same in the backward: grad_output, input gradient."""


def keep_history(module: Any) -> bool:
    """Keep a module's state of delayed scaling, or put a kept one back.

    Returns:
        Whether the module now holds such a state.
    """
    # Transformer Engine updates all modules at once: its global buffers hold the tensors of the
    # first state that a module had. After another recipe the module would build a new state, which
    # no update would reach.
    if _is_delayed(module):
        module.__dict__[_KEPT] = {
            key: (module.fp8_meta[key], module.quantizers[key]) for key in _KEYS
        }
        return True
    if _KEPT not in module.__dict__:
        return False
    for key, (state, quantizers) in module.__dict__[_KEPT].items():
        module.fp8_meta[key] = state
        module.quantizers[key] = quantizers
    return True


def scaling_states(module: Any) -> list[Any]:
    """Return a module's states of delayed scaling, in use or kept; each has a history and scales.

    The backward's is among them. The list is empty for a module that has never run it.
    """
    if _is_delayed(module):
        return [module.fp8_meta[key] for key in _KEYS]
    return [state for state, _ in module.__dict__.get(_KEPT, {}).values()]


def delayed_scales(module: Any, index: int = 0) -> Tensor | None:
    """Return the scales [3] of X, W and G; None if the module does not run delayed scaling.

    Args:
        module: a Transformer Engine linear.
        index: which expert of a grouped linear.
    """
    if not _is_delayed(module):
        return None
    forward = module.fp8_meta["scaling_fwd"].scale
    backward = module.fp8_meta["scaling_bwd"].scale
    of_input = _FORWARD_TENSORS * index  # the weight's follows
    of_grad_output = _BACKWARD_TENSORS * index
    return torch.cat([forward[of_input : of_input + 2], backward[of_grad_output].view(1)])


def _is_delayed(module: Any) -> bool:
    # Recognized by name, without importing Transformer Engine.
    states = (getattr(module, "fp8_meta", {}).get(key) for key in _KEYS)
    return all(type(state).__name__ == "DelayedScalingRecipeState" for state in states)
