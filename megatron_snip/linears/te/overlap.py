"""Tensor-parallel communication that overlaps GEMMs (`--tp-comm-overlap`), under a plan.

Transformer Engine communicates in buffers that were made before training, for FP8 or for high
precision (both from 2.7 on, `patches/overlap_buffers.py`). It looks one up in every forward:

    bf16                             the buffer in high precision
    tensorwise, delayed, mxfp8       the FP8 buffer
    others, formats per GEMM         none

A linear whose recipe has no buffer communicates by NCCL, without overlap.
"""

import sys
from collections.abc import Sequence
from typing import Any

from megatron_snip.linears.te.recipe import BF16_RECIPE, TERecipe
from megatron_snip.linears.te.recipe_table import RECIPES

_BASE = "transformer_engine.pytorch.module.base"
_FLAGS = (
    "ub_overlap_ag_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_fprop",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
"""Attributes of a module, read in every forward: where a GEMM runs while ranks communicate."""


def overlap_flags(module: Any) -> tuple[str, ...]:
    """Return the attributes by which a module overlaps in the job."""
    return tuple(flag for flag in _FLAGS if getattr(module, flag, False))


def set_overlap(module: Any, flags: Sequence[str], recipe: TERecipe | None) -> None:
    """Let a module overlap in its next forward only if there is a buffer for it.

    Args:
        module: a Transformer Engine linear.
        flags: what `overlap_flags` returned before any change.
        recipe: what the forward runs; None for the job's own, which has its buffer.
    """
    if not flags:
        return
    overlaps = recipe is None or _has_buffer(recipe)
    for flag in flags:
        module.fast_setattr(flag, overlaps)


def _has_buffer(recipe: TERecipe) -> bool:
    if recipe == BF16_RECIPE:
        mode = "NONE"  # Transformer Engine's `UserBufferQuantizationMode`
    elif recipe.is_uniform and RECIPES[recipe.fprop].has_overlap_buffer:
        mode = "FP8"
    else:
        return False
    # Its keys are (name of the GEMM, mode).
    buffers = getattr(sys.modules.get(_BASE), "_ub_communicators", None) or ()
    return any(getattr(found, "name", None) == mode for _, found in buffers)
