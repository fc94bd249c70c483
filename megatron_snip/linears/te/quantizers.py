"""Quantizer factories for options that differ per GEMM, for Transformer Engine's CustomRecipe.

A Transformer Engine linear quantizes each operand once, row-wise and column-wise, and every GEMM
takes one of the two:

                   row-wise        column-wise
    input          fprop           wgrad
    weight         fprop           dgrad
    grad_output    dgrad           wgrad

So a quantizer that combines two formats gives each GEMM its own. A factory's name is made of its
three recipes, fprop_dgrad_wgrad: `megatron_snip.linears.te.quantizers.nvfp4_mxfp8_bf16`. Megatron's
`custom_recipe_factory` takes that path. A name always gives the same function object, by which
Transformer Engine recognizes that the recipe has not changed.

Needs Transformer Engine's QuantizerRole, HybridQuantizer and IdentityQuantizer
(`machine.this_machine` checks). The quantizers are those that its built-in recipes make, as its
environment variables set them.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_snip.linears.te.recipe import TERecipe, factory_recipe
from megatron_snip.linears.te.recipe_table import RECIPES

Quantizer = Any
"""A Transformer Engine quantizer."""

Role = Any
"""A Transformer Engine QuantizerRole, or None."""

_GEMMS = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
}
"""Operand -> the GEMM that takes its rows, and the one that takes its columns."""


def __getattr__(name: str) -> Callable[[Role], Quantizer]:
    """Return the factory called `name`.

    Raises:
        AttributeError: if the name is not made of three recipes.
    """
    recipe = factory_recipe(name)
    if recipe is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _factory(recipe)


@functools.cache
def _factory(recipes: TERecipe) -> Callable[[Role], Quantizer]:
    def make(role: Role) -> Quantizer:
        gemms = _GEMMS.get(getattr(role, "tensor_type", ""))
        if gemms is None:  # outputs and input gradients stay in high precision
            return _built_in("bf16", role)
        row, column = (getattr(recipes, gemm) for gemm in gemms)
        if row == column:
            return _built_in(row, role)
        from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

        of_columns = _built_in(column, role)
        # NVFP4's 16x16 blocks of the weight serve rows and columns alike. For columns alone 1x16
        # tiles along the contraction are finer, and Transformer Engine's own mixed recipes use
        # them.
        if getattr(of_columns, "with_2d_quantization", False):
            of_columns.with_2d_quantization = False
        return HybridQuantizer(
            rowwise_quantizer=_built_in(row, role), columnwise_quantizer=of_columns
        )

    # Checkpoints pickle a module's recipe, and with it the factory, by name.
    make.__name__ = make.__qualname__ = "_".join(recipes)
    make.__doc__ = f"Return a role's quantizer for fprop, dgrad, wgrad in {', '.join(recipes)}."
    return make


def _built_in(name: str, role: Role) -> Quantizer:
    """Return a new quantizer as the built-in recipe makes it for a role."""
    if name == "bf16":
        from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

        return IdentityQuantizer()
    from transformer_engine.pytorch.quantization import RecipeState

    mode = "backward" if role.tensor_type == "grad_output" else "forward"
    made = RecipeState.create(built_in_recipe(name), mode=mode, num_quantizers=1, roles=[role])
    return made.make_quantizers()[0]


def built_in_recipe(name: str) -> Any:
    """Return Transformer Engine's own recipe object of a low precision in `RECIPES`."""
    from transformer_engine.common import recipe as built_in

    recipe = RECIPES[name]
    number_format = built_in.Format[recipe.precision.format.upper()]
    fields = {"fp8_format": number_format} if recipe.precision.kind == "fp8" else {}
    return getattr(built_in, recipe.recipe_class)(**fields)
