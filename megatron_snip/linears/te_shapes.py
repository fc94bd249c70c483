"""Whether a linear's shapes suit a Transformer Engine recipe.

Tensor cores take low-precision operands in whole groups along the contraction, so a weight's
shard must be a multiple of the group in both dimensions, and so must the tokens, which are the
contraction of wgrad. A dense linear's tokens are the microbatch's; an expert's are whatever the
router sends, and Megatron pads them only where the whole run quantizes (`--fp8-format`,
`--fp4-format`), to what that run's own recipe needs.

Groups: 16 for FP8 blocks, 32 for MXFP8; for NVFP4 32 in weights and 128 tokens of an expert, which
is what Megatron pads to for FP4 (its Hadamard transform and scale layout work in whole groups).
"""

from __future__ import annotations

from typing import Any

from megatron_snip.linears.te_modules import weights_of
from megatron_snip.planning.te_recipe import TERecipe
from megatron_snip.topology import Placement

WEIGHT_GROUP = {"bf16": 1, "blockwise": 16, "mxfp8": 32, "nvfp4": 32}
"""What both dimensions of a weight's shard must be multiples of, by the recipe's word."""

TOKEN_GROUP = {"bf16": 1, "blockwise": 16, "mxfp8": 32, "nvfp4": 128}
"""What an expert's tokens must be multiples of, by the recipe's word."""


def unfit(module: Any, placement: Placement, recipe: TERecipe) -> str | None:
    """Return why a linear's shapes do not suit a recipe, or None if they do.

    Args:
        module: a Transformer Engine linear.
        placement: of one of its weights.
        recipe: what it is to run.
    """
    shape = tuple(weights_of(module)[0].shape)
    group = max(WEIGHT_GROUP[word] for word in recipe.words)
    if any(size % group for size in shape):
        return f"its weight's shard {shape} is not a multiple of {group} as {recipe} needs"
    if placement.expert is None:
        return None
    needed = max(TOKEN_GROUP[word] for word in recipe.words)
    padded = padded_tokens(module.config)
    if needed == 1 or (padded > 0 and padded % needed == 0):
        return None
    padding = f"padded to {padded}" if padded else "not padded"
    return (
        f"experts' tokens are {padding} and {recipe} needs multiples of {needed}: Megatron pads "
        "for the run's own recipe, so give it --fp8-format or --fp4-format with that recipe"
    )


def padded_tokens(config: Any) -> int:
    """Return what Megatron pads an expert's tokens to a multiple of; 0 where it does not."""
    if getattr(config, "fp8", None):
        return 32 if str(getattr(config, "fp8_recipe", "")).endswith("mxfp8") else 16
    return 128 if getattr(config, "fp4", None) else 0
