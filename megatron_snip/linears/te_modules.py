"""Transformer Engine's linears in Megatron's wrappers: which they are, what they multiply.

    TEColumnParallelLinear              X W^T, W sharded by out_features
    TELayerNormColumnParallelLinear     norm(X) W^T, likewise
    TERowParallelLinear                 X W^T, W sharded by in_features
    TEGroupedLinear and its children    one W an expert, tokens sorted by expert
    TELinear itself                     X W^T, W whole on every rank (te_replicas.py)

All are recognized by Megatron's classes, without importing Transformer Engine: a model that has
such a linear has imported them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.topology import LinearKind

_EXTENSION = "megatron.core.extensions.transformer_engine"
_KINDS: dict[str, LinearKind] = {
    "TELayerNormColumnParallelLinear": "column",
    "TEColumnParallelLinear": "column",
    "TERowParallelLinear": "row",
    "TEColumnParallelGroupedLinear": "column",
    "TERowParallelGroupedLinear": "row",
}
_PLAIN = "TELinear"
_OVERLAPS = (
    "ub_overlap_ag_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_fprop",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
"""What Transformer Engine sets where a GEMM runs while tensor ranks communicate."""


def te_kind(module: torch.nn.Module) -> LinearKind | None:
    """Return how a Transformer Engine linear is sharded, or None if `module` is none of them.

    A plain TELinear is not sharded: it counts as a column linear in one shard.
    """
    classes = _classes()
    for name, kind in _KINDS.items():
        if name in classes and isinstance(module, classes[name]):
            return kind
    return "column" if is_plain(module) else None


def is_plain(module: torch.nn.Module) -> bool:
    """Whether a module is a TELinear that is neither column- nor row-parallel."""
    classes = _classes()
    sharded = tuple(classes[name] for name in _KINDS if name in classes)
    plain = classes.get(_PLAIN)
    return plain is not None and isinstance(module, plain) and not isinstance(module, sharded)


def is_grouped(module: torch.nn.Module) -> bool:
    """Whether a Transformer Engine linear holds several experts."""
    grouped = _classes().get("TEGroupedLinear")
    return grouped is not None and isinstance(module, grouped)


def weights_of(module: Any) -> list[torch.nn.Parameter]:
    """Return the weights, [N, K] of this shard each: one, or one an expert.

    Raises:
        UnsupportedError: if all experts' weights are one tensor.
    """
    if not is_grouped(module):
        return [module.weight]
    if getattr(module, "single_grouped_weight", False):
        raise UnsupportedError(
            "experts whose weights are one tensor cannot be planned; drop "
            "--moe-single-grouped-weight"
        )
    return [getattr(module, f"weight{i}") for i in range(module.num_gemms)]


def refuse_overlap(module: Any, name: str) -> None:
    """Refuse a linear whose tensor-parallel communication is overlapped with its GEMMs.

    Megatron makes the buffers for the run's own precision, low or high, and Transformer Engine
    fails where a module's recipe needs the other; no buffer holds NVFP4 or blockwise FP8.

    Args:
        module: a Transformer Engine linear.
        name: of the linear.

    Raises:
        UnsupportedError: one line with the remedy.
    """
    if any(getattr(module, flag, False) for flag in _OVERLAPS):
        raise UnsupportedError(
            f"--snip cannot plan {name} ({type(module).__name__}): the buffers of overlapped "
            "tensor-parallel communication hold one precision; drop --tp-comm-overlap"
        )


def gathers_input(module: Any) -> bool:
    """Whether the linear gathers its tokens over its tensor axis (sequence parallelism)."""
    return bool(
        getattr(module, "sequence_parallel", False)
        and getattr(module, "parallel_mode", None) == "column"
        and not is_grouped(module)
    )


def scatters_output(module: Any) -> bool:
    """Whether the linear leaves each rank of its tensor axis only a part of its tokens."""
    return bool(
        getattr(module, "sequence_parallel", False)
        and getattr(module, "parallel_mode", None) == "row"
        and not is_grouped(module)
    )


def multiplied_input(module: Any, input: torch.Tensor) -> torch.Tensor:
    """Return what the GEMM multiplies: the input, normalized first where a norm is fused.

    The norm is computed again in FP32 and rounded once to the input's dtype, as the fused kernel
    does up to the order of its sums.

    Args:
        module: a Transformer Engine linear.
        input: [tokens or [s, b], K].
    """
    weight: torch.Tensor | None = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return input
    with torch.no_grad():
        x = input.float()
        gain = weight.float() + (1.0 if module.zero_centered_gamma else 0.0)
        if module.normalization == "RMSNorm":
            scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + float(module.eps))
            normal = x * scale * gain
        else:
            bias: torch.Tensor = module.layer_norm_bias
            normal = torch.nn.functional.layer_norm(
                x, x.shape[-1:], gain, bias.float(), float(module.eps)
            )
        return normal.to(input.dtype)


def _classes() -> dict[str, type]:
    """Megatron's wrappers by name, where they have been imported with Transformer Engine."""
    extension: Any = sys.modules.get(_EXTENSION)
    if extension is None or not getattr(extension, "HAVE_TE", False):
        return {}
    names = (*_KINDS, _PLAIN, "TEGroupedLinear")
    found = {name: getattr(extension, name, None) for name in names}
    return {name: cls for name, cls in found.items() if isinstance(cls, type)}
