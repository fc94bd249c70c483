"""Transformer Engine linears that every tensor-parallel rank holds whole, counted once.

Megatron's plain TELinear (`parallel_mode="duplicated"`) is not sharded: latent attention's down
projections and the projections around latent experts. Under sequence parallelism each rank
multiplies its own part of the tokens, and Megatron adds the weight's gradients; else every rank
does the same work.

    Y_r = X_r W^T,  dW = sum_r G_r^T X_r        X = [X_0; X_1; ...], rows in the ranks' order

An observer gathers the sampled tokens of X and G from all ranks, so that every rank measures the
same, and rank 0 reports it (`topology.TensorAxis`). (Without sequence parallelism Megatron leaves
the positional columns of latent attention's G unreduced over these ranks: rank 0's stand for them,
as for its own gradient.)
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_snip.linears.te_modules import is_plain

_SPLIT = frozenset(
    {
        "linear_q_down_proj",
        "linear_kv_down_proj",
        "linear_qkv_down_proj",
        "fc1_latent_proj",
        "fc2_latent_proj",
    }
)
"""Modules that Megatron (0.16 to 0.19) gives a rank's own part of the tokens under sequence
parallelism. Others may gather their input before (a sparse attention's indexer does)."""


def is_replica(module: torch.nn.Module) -> bool:
    """Whether several tensor-parallel ranks hold the whole weight of this linear."""
    config: Any = getattr(module, "config", None)
    return is_plain(module) and int(getattr(config, "tensor_model_parallel_size", 1)) > 1


def is_understood(name: str) -> bool:
    """Whether it is known which tokens a replica of this name multiplies."""
    return name.rsplit(".", 1)[-1] in _SPLIT


def splits_tokens(module: Any) -> bool:
    """Whether each tensor-parallel rank multiplies only its own part of the tokens."""
    return is_replica(module) and bool(module.config.sequence_parallel)
