"""What a forward-backward changes besides gradients, saved so that it can be undone."""

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_snip.linears.te.history import scaling_states

_MAX_LOGITS = "current_max_attn_logits"
"""Attribute of Megatron's attention over Transformer Engine: None, or a tensor by head."""


_SPARSE_ATTENTION = "megatron.core.transformer.experimental_attention_variant.dsa"


class TrainingStateSnapshot:
    """What a forward-backward changes besides gradients, saved so that it can be undone.

    Random number generators (torch, CUDA, Megatron's tracker, numpy, random), module buffers, the
    history and the scales of delayed scaling, the losses that Megatron adds up for its log (MoE's
    auxiliary losses, MTP's, those of sparse attention), and the largest attention logits, by which
    `--qk-clip` scales weights.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Save it; `chunks` are the model's, wrapped or not."""
        # DDP hides `Module.buffers` behind a list of its own
        buffers = [b for chunk in chunks for b in torch.nn.Module.buffers(chunk)]
        self._tensors = buffers + _logged_losses()
        self._values = [tensor.clone() for tensor in self._tensors]
        self._modules = [module for chunk in chunks for module in chunk.modules()]
        # Megatron replaces this tensor in each forward.
        self._max_logits = [
            (m, getattr(m, _MAX_LOGITS)) for m in self._modules if hasattr(m, _MAX_LOGITS)
        ]
        states = self._scaling_states()
        self._scaling = [(each, each.amax_history.clone(), each.scale.clone()) for each in states]
        tracker = get_cuda_rng_tracker().get_states()
        self._tracker = {name: _copied(state) for name, state in tracker.items()}
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._numpy = np.random.get_state()
        self._random = random.getstate()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; may be called more than once."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        for tensor in _logged_losses():
            if not any(tensor is saved for saved in self._tensors):
                tensor.zero_()  # created since
        for module, logits in self._max_logits:
            setattr(module, _MAX_LOGITS, logits)
        for state in self._scaling_states():
            state.amax_history.zero_()  # as new; those that were there follow
            state.scale.fill_(1.0)
        for state, history, scale in self._scaling:
            state.amax_history.copy_(history)
            state.scale.copy_(scale)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        if self._tracker:  # the tracker changes the dict and generators that it is given
            states = {name: _copied(state) for name, state in self._tracker.items()}
            get_cuda_rng_tracker().set_states(states)
        np.random.set_state(self._numpy)
        random.setstate(self._random)

    def _scaling_states(self) -> list[Any]:
        """Return Transformer Engine's states of delayed scaling; a forward may make new ones."""
        return [state for module in self._modules for state in scaling_states(module)]


def _logged_losses() -> list[torch.Tensor]:
    """Return the sums that every forward adds to: losses of MoE, MTP and sparse attention."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    trackers = [MTPLossLoggingHelper.tracker]
    sparse_attention = sys.modules.get(_SPARSE_ATTENTION)  # loaded by models that have it
    if sparse_attention is not None:
        trackers.append(sparse_attention.DSAIndexerLossLoggingHelper.tracker)
    # The names of the entries differ between releases.
    found = [value for tracker in trackers for value in tracker.values()]
    return _moe_losses() + [value for value in found if isinstance(value, torch.Tensor)]


def _moe_losses() -> list[torch.Tensor]:
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # Megatron-Core before 0.18
        from megatron.core.transformer.moe import moe_utils

        trackers = moe_utils.get_moe_layer_wise_logging_tracker().values()
        return [tracker["values"] for tracker in trackers if "values" in tracker]
    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]


def _copied(state: Any) -> Any:
    """Copy a tracker's state: a tensor, or a generator whose own state advances."""
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()
