"""Quantizers by GEMM: which operand is in which format along which direction."""

import itertools
import pickle
from typing import Any

import pytest
from megatron.core.fp8_utils import _get_custom_recipe
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from megatron_snip.linears.te import quantizers
from megatron_snip.linears.te.recipe import TERecipe
from megatron_snip.linears.te.recipe_table import RECIPES

STATELESS = [name for name, recipe in RECIPES.items() if recipe.per_gemm]
EVERY = [TERecipe(*names) for names in itertools.product(STATELESS, repeat=3)]


def factory(recipe: TERecipe) -> Any:
    return getattr(quantizers, "_".join(recipe))


CLASSES = {
    "bf16": "IdentityQuantizer",
    "tensorwise": "Float8CurrentScalingQuantizer",
    "blockwise": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
    "nvfp4": "NVFP4Quantizer",
}


def directions(recipe: TERecipe, tensor: str) -> tuple[Any, Any]:
    """The quantizers of an operand's rows and columns."""
    quantizer = factory(recipe)(QuantizerRole("linear", tensor, "fc1"))
    if isinstance(quantizer, HybridQuantizer):
        return quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
    return quantizer, quantizer


def check_quantizer(quantizer: Any, recipe: str, tensor: str) -> None:
    """Of the recipe's class; E5M2 for a gradient of a hybrid recipe alone."""
    name = recipe.removesuffix("_hybrid")
    assert type(quantizer).__name__ == CLASSES[name]
    if name in ("tensorwise", "blockwise", "mxfp8"):
        is_gradient = tensor == "grad_output"
        wanted = DType.kFloat8E5M2 if is_gradient and name != recipe else DType.kFloat8E4M3
        assert quantizer.dtype == wanted


@pytest.mark.parametrize("fprop", STATELESS)
def test_every_gemm_has_both_operands_in_its_format(fprop: str) -> None:
    """Rows of X and W make Y, rows of G and columns of W dX, columns of G and X dW."""
    for recipe in (recipe for recipe in EVERY if recipe.fprop == fprop):
        x_row, x_column = directions(recipe, "input")
        w_row, w_column = directions(recipe, "weight")
        g_row, g_column = directions(recipe, "grad_output")
        check_quantizer(x_row, recipe.fprop, "input")
        check_quantizer(w_row, recipe.fprop, "weight")
        check_quantizer(g_row, recipe.dgrad, "grad_output")
        check_quantizer(w_column, recipe.dgrad, "weight")
        if recipe.fprop != recipe.dgrad:  # 1x16 tiles, not the 16x16 blocks that serve both
            assert not getattr(w_column, "with_2d_quantization", False)
        check_quantizer(g_column, recipe.wgrad, "grad_output")
        check_quantizer(x_column, recipe.wgrad, "input")


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
