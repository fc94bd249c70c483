"""Transformer Engine's linears in Megatron's wrappers: which they are, what they multiply.

    TEColumnParallelLinear              X W^T, W sharded by out_features
    TELayerNormColumnParallelLinear     norm(X) W^T, likewise
    TERowParallelLinear                 X W^T, W sharded by in_features
    TEGroupedLinear and its children    one W per expert, tokens sorted by expert
    TELinear itself                     X W^T, the full W on every tensor-parallel rank

They are recognized by Megatron's classes, without importing Transformer Engine: a model that has
such a linear has imported them.

The last kind (`parallel_mode="duplicated"`) is replicated. Only those in `TOKENS_KNOWN` are
planned: latent attention's down projections and the projections around latent experts. Under
sequence parallelism each rank multiplies its own part of the tokens, and Megatron adds the weight's
gradients; else every rank does the same work.

    Y_r = X_r W^T,  dW = sum_r G_r^T X_r        X = [X_0; X_1; ...], rows in the ranks' order

An observer gathers the sampled tokens of X and G from all ranks, so that every rank measures the
same, and rank 0 reports it (`topology.Axis`). Without sequence parallelism Megatron does not reduce
the positional columns of latent attention's G over these ranks; rank 0's are used.
"""

import importlib
import sys
from typing import Any

import torch
from torch.nn import functional

from megatron_snip.errors import UnsupportedError
from megatron_snip.statistics.sharded import model_weight
from megatron_snip.topology import LinearKind

EXTENSION = "megatron.core.extensions.transformer_engine"
_KINDS: dict[str, LinearKind | None] = {
    "TELayerNormColumnParallelLinear": "column",
    "TEColumnParallelLinear": "column",
    "TERowParallelLinear": "row",
    "TEColumnParallelGroupedLinear": "column",
    "TERowParallelGroupedLinear": "row",
    "TELinear": "column",
    "TEGroupedLinear": None,
}
"""Children come before the classes that they inherit from; TEGroupedLinear itself is not built."""

TOKENS_KNOWN = frozenset(
    {
        "linear_q_down_proj",
        "linear_kv_down_proj",
        "linear_qkv_down_proj",
        "fc1_latent_proj",
        "fc2_latent_proj",
    }
)
"""Replicated modules that Megatron (0.16 to 0.19) gives a rank's own part of the tokens under
sequence parallelism. Others may gather their input first (a sparse attention's indexer does)."""


def have_te() -> bool:
    """Return whether Megatron has found Transformer Engine."""
    return bool(importlib.import_module(EXTENSION).HAVE_TE)


def te_kind(module: torch.nn.Module) -> LinearKind | None:
    """Return how a Transformer Engine linear is sharded; None for what SNIP does not plan.

    A plain TELinear is not sharded: it counts as a column linear with one shard.
    """
    return _KINDS.get(_class_of(module))


def is_grouped(module: torch.nn.Module) -> bool:
    """Return whether a Transformer Engine linear holds several experts."""
    return _class_of(module).endswith("GroupedLinear")


def is_replicated(module: torch.nn.Module) -> bool:
    """Return whether several tensor-parallel ranks hold the full weight of this linear."""
    config: Any = getattr(module, "config", None)
    num_ranks = int(getattr(config, "tensor_model_parallel_size", 1))
    return num_ranks > 1 and _class_of(module) == "TELinear"


def weights_of(module: Any) -> tuple[torch.nn.Parameter, ...]:
    """Return the weights, [N, K] of this shard each: one, or one per expert.

    Under FSDP they are complete only while the module runs.

    Raises:
        UnsupportedError: if all experts' weights are one tensor.
    """
    if not is_grouped(module):
        return (model_weight(module.weight),)
    if getattr(module, "single_grouped_weight", False):
        raise UnsupportedError(
            "experts whose weights are one tensor cannot be planned; drop "
            "--moe-single-grouped-weight"
        )
    return tuple(model_weight(getattr(module, f"weight{i}")) for i in range(module.num_gemms))


def gathers_input(module: Any) -> bool:
    """Return whether the linear gathers its tokens over its tensor axis."""
    return _is_sequence_parallel(module, "column")


def input_is_split(module: Any) -> bool:
    """Return whether this rank's input holds only a part of the tokens that the linear sees."""
    return gathers_input(module) or splits_tokens(module)


def output_is_split(module: Any) -> bool:
    """Return whether this rank's output holds only a part of the tokens."""
    return _is_sequence_parallel(module, "row") or splits_tokens(module)


def splits_tokens(module: Any) -> bool:
    """Return whether this rank multiplies only its own part of the tokens by the full weight."""
    return is_replicated(module) and bool(module.config.sequence_parallel)


def _is_sequence_parallel(module: Any, parallel_mode: str) -> bool:
    is_parallel = module.sequence_parallel and module.parallel_mode == parallel_mode
    return bool(is_parallel) and not is_grouped(module)


def expert_sizes(m_splits: Any) -> list[int]:
    """Return the number of tokens of each expert, from the `m_splits` of a grouped forward."""
    return m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)


def multiplied_input(module: Any, input: torch.Tensor, is_rounded: bool = True) -> torch.Tensor:
    """Return what the GEMM multiplies: the input, normalized first where a norm is fused.

    The norm is computed in FP32 and rounded once to the input's dtype, as the fused kernel does up
    to the order of its sums.

    Args:
        module: a Transformer Engine linear.
        input: [tokens or [s, b], K].
        is_rounded: False leaves the norm's result in FP32: delayed scaling quantizes that.
    """
    weight: torch.Tensor | None = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return input
    x = input.float()
    gain = weight.float() + (1.0 if module.zero_centered_gamma else 0.0)
    shape, eps = x.shape[-1:], float(module.eps)
    if module.normalization == "RMSNorm":
        normal = functional.rms_norm(x, shape, gain, eps)
    else:
        normal = functional.layer_norm(x, shape, gain, module.layer_norm_bias.float(), eps)
    return normal.to(input.dtype) if is_rounded else normal


def _class_of(module: torch.nn.Module) -> str:
    """Return the name of the first of Megatron's wrappers that a module is; empty for none."""
    extension: Any = sys.modules.get(EXTENSION)
    if not getattr(extension, "HAVE_TE", False):
        return ""
    for name in _KINDS:
        wrapper = getattr(extension, name, None)  # a release may lack it
        if wrapper is not None and isinstance(module, wrapper):
            return name
    return ""
