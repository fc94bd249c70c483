"""Traces: what a forward-backward leaves behind besides gradients, kept so that it can be undone.

Random streams (torch, CUDA, Megatron's tracker, numpy, random), module buffers, and the losses
that Megatron adds up for its log (MoE's auxiliary losses, MTP's).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


class Traces:
    """What a forward-backward would change, as it is now."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Keep it; `chunks` are the model's, wrapped or not."""
        self._rng = _rng_states()
        self._tensors = [b for chunk in chunks for b in _buffers(chunk)] + _logged_losses()
        self._values = [tensor.clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; may be called more than once."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        for tensor in _logged_losses():
            if not any(tensor is known for known in self._tensors):
                tensor.zero_()  # begun since
        _set_rng_states(self._rng)


def _buffers(chunk: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The module's buffers; DDP hides `Module.buffers` behind a list of its own."""
    return torch.nn.Module.buffers(chunk)


def _logged_losses() -> list[torch.Tensor]:
    """What Megatron adds up for its log in every forward (MoE's auxiliary losses, MTP's)."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    return _moe_losses() + ([tracker["values"]] if "values" in tracker else [])


def _moe_losses() -> list[torch.Tensor]:
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # Megatron-Core before 0.18
        from megatron.core.transformer.moe import moe_utils

        trackers = moe_utils.get_moe_layer_wise_logging_tracker().values()
        return [tracker["values"] for tracker in trackers if "values" in tracker]
    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]


def _rng_states() -> dict[str, Any]:
    tracker = get_cuda_rng_tracker()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": {name: _copied(state) for name, state in tracker.get_states().items()},
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }


def _copied(state: Any) -> Any:
    """Copy a tracker's state: a tensor, or a generator whose own state moves on."""
    if isinstance(state, torch.Generator):
        return state.clone_state()
    return state.clone()


def _set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    if states["tracker"]:
        get_cuda_rng_tracker().set_states(states["tracker"])
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])
