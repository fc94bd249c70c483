"""Quantizers by GEMM: which operand is in which format along which direction."""

import itertools
import pickle
from typing import Any

import pytest
from megatron.core.fp8_utils import _get_custom_recipe
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.quantizers import HybridQuantizer, IdentityQuantizer

from megatron_snip.linears.te import quantizers
from megatron_snip.linears.te.recipe import RECIPES, TERecipe

STATELESS = [name for name, recipe in RECIPES.items() if recipe.per_gemm]
EVERY = [TERecipe(*names) for names in itertools.product(STATELESS, repeat=3)]


def factory(recipe: TERecipe) -> Any:
    return getattr(quantizers, "_".join(recipe))


def directions(recipe: TERecipe, tensor: str) -> tuple[str, str]:
    quantizer = factory(recipe)(QuantizerRole("linear", tensor, "fc1"))
    assert isinstance(quantizer, HybridQuantizer) == (
        quantizer.row_recipe != quantizer.column_recipe
    )
    return quantizer.row_recipe, quantizer.column_recipe


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_every_gemm_has_both_operands_in_its_format(recipe: TERecipe) -> None:
    """Rows of X and W make Y, rows of G and columns of W dX, columns of G and X dW."""
    x_row, x_column = directions(recipe, "input")
    w_row, w_column = directions(recipe, "weight")
    g_row, g_column = directions(recipe, "grad_output")
    assert (x_row, w_row) == (recipe.fprop, recipe.fprop)
    assert (g_row, w_column) == (recipe.dgrad, recipe.dgrad)
    assert (g_column, x_column) == (recipe.wgrad, recipe.wgrad)


def test_what_no_gemm_takes_stays_in_high_precision() -> None:
    make = quantizers.nvfp4_mxfp8_blockwise
    roles = [QuantizerRole("linear", tensor, "") for tensor in ("output", "grad_input", "", "qkv")]
    assert all(isinstance(make(role), IdentityQuantizer) for role in (*roles, None))


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_a_name_gives_one_function_for_ever(recipe: TERecipe) -> None:
    make = factory(recipe)
    assert make is factory(recipe)
    assert pickle.loads(pickle.dumps(make)) is make
    if not recipe.is_uniform:
        found = _get_custom_recipe(recipe.factory)  # as Megatron finds it
        assert found.qfactory is make and found == _get_custom_recipe(recipe.factory)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_mxfp8", "mxfp8_mxfp8_fp4", "__path__", "a_b_c"])
def test_other_names_are_not_there(name: str) -> None:
    assert not hasattr(quantizers, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(quantizers, name)
