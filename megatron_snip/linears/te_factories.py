"""Quantizer factories for options that differ by GEMM, under Transformer Engine's CustomRecipe.

A Transformer Engine linear quantizes each operand once, row by row and column by column, and every
GEMM takes one of the two:

                   row-wise        column-wise
    input          fprop           wgrad
    weight         fprop           dgrad
    grad_output    dgrad           wgrad

so a quantizer that composes two formats lets each GEMM have its own. A factory is named by its
three words, fprop_dgrad_wgrad: `megatron_snip.linears.te_factories.nvfp4_mxfp8_bf16`. That path is
what Megatron's `custom_recipe_factory` takes; a name always gives the same function object, by
which Transformer Engine recognizes that the recipe has not changed.

Needs Transformer Engine's QuantizerRole, HybridQuantizer and IdentityQuantizer (`te_support.py`
asks for them). Quantizers themselves are those of its built-in recipes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_snip.planning.te_recipe import FORMAT_OF_WORD

Quantizer = Any
"""A Transformer Engine quantizer."""

Role = Any
"""A Transformer Engine QuantizerRole, or None."""

_DIRECTIONS = {"input": (0, 2), "weight": (0, 1), "grad_output": (1, 2)}
"""Operand -> the GEMMs (of fprop, dgrad, wgrad) that take its rows and its columns."""


def __getattr__(name: str) -> Callable[[Role], Quantizer]:
    """Return the factory called `name`.

    Raises:
        AttributeError: if the name is not three words of recipes.
    """
    words = tuple(name.split("_"))
    if len(words) != 3 or not set(words) <= set(FORMAT_OF_WORD):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _factory(words)


@functools.cache
def _factory(words: tuple[str, ...]) -> Callable[[Role], Quantizer]:
    def make(role: Role) -> Quantizer:
        return _quantizer(role, words)

    # Checkpoints pickle a module's recipe, and with it the factory, by name.
    make.__name__ = make.__qualname__ = "_".join(words)
    make.__doc__ = f"Return the quantizer of a role for fprop, dgrad, wgrad in {', '.join(words)}."
    return make


def _quantizer(role: Role, words: tuple[str, ...]) -> Quantizer:
    directions = _DIRECTIONS.get(getattr(role, "tensor_type", ""))
    if directions is None:  # outputs and input gradients stay in high precision
        return _one("bf16", role)
    row, column = (words[gemm] for gemm in directions)
    if row == column:
        return _one(row, role)
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

    return HybridQuantizer(
        rowwise_quantizer=_one(row, role), columnwise_quantizer=_column(column, role)
    )


def _one(word: str, role: Role) -> Quantizer:
    """Return a new quantizer as the built-in recipe has it for a role."""
    from transformer_engine.pytorch.custom_recipes import quantizer_factories as built_in

    factories = {
        "bf16": built_in.high_precision_factory,
        "blockwise": built_in.float8_block_scaling_factory,
        "mxfp8": built_in.mxfp8_factory,
        "nvfp4": built_in.nvfp4_factory,
    }
    return factories[word](role)


def _column(word: str, role: Role) -> Quantizer:
    """Return the quantizer of columns whose rows have another format.

    NVFP4's 16x16 blocks of the weight serve rows and columns alike; for columns alone 1x16 tiles
    along the contraction are finer, and what Transformer Engine's own mixed recipes use.
    """
    if word == "nvfp4" and role.tensor_type == "weight":
        from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

        return NVFP4Quantizer()
    return _one(word, role)
