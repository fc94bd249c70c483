"""Which shapes a Transformer Engine recipe accepts, and what Megatron pads experts' tokens to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.transformer.moe import moe_utils

from megatron_snip.linears.te.modules import padded_tokens, shape_refusal
from megatron_snip.linears.te.recipe import RECIPES, TERecipe


def linear(rows: int, cols: int, **config: Any) -> Any:
    weight = torch.empty(rows, cols, device="meta")
    return SimpleNamespace(weight=weight, config=SimpleNamespace(**config))


def accepted(module: Any, is_expert: bool = False) -> set[str]:
    names = set(RECIPES)
    return {n for n in names if shape_refusal(module, is_expert, TERecipe(n, n, n)) is None}


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((128, 128), {"bf16", "blockwise", "mxfp8", "nvfp4"}),
        ((48, 128), {"bf16", "blockwise"}),
        ((128, 48), {"bf16", "blockwise"}),
        ((96, 40), {"bf16"}),
    ],
)
def test_both_dimensions_of_a_shard_must_be_multiples(
    shape: tuple[int, int], names: set[str]
) -> None:
    assert accepted(linear(*shape)) == names


def test_the_largest_multiple_of_a_mixed_recipe_counts() -> None:
    module = linear(48, 48)
    assert shape_refusal(module, False, TERecipe("blockwise", "bf16", "bf16")) is None
    refusal = shape_refusal(module, False, TERecipe("blockwise", "bf16", "mxfp8"))
    assert refusal is not None and "(48, 48)" in refusal and "mxfp8" in refusal


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"fp8": None, "fp4": None}, {"bf16"}),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, {"bf16", "blockwise"}),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"bf16", "blockwise", "mxfp8"}),
        ({"fp4": "e2m1"}, {"bf16", "blockwise", "mxfp8", "nvfp4"}),
    ],
)
def test_experts_run_what_their_tokens_are_padded_for(
    config: dict[str, Any], names: set[str]
) -> None:
    module = linear(128, 128, **config)
    assert accepted(module) == set(RECIPES)  # a dense linear's tokens are not padded
    assert accepted(module, is_expert=True) == names


def test_padding_is_megatron_s_own() -> None:
    """The numbers are those of the installed Megatron-Core; the recipe is an enum there."""
    for fp8 in (Fp8Recipe.tensorwise, Fp8Recipe.blockwise, Fp8Recipe.mxfp8, Fp8Recipe.delayed):
        for recipe in (fp8, str(fp8.value)):
            config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe, fp4=None)
            config.use_transformer_engine_op_fuser = False
            assert padded_tokens(config) == moe_utils.get_align_size_for_quantization(config)
    config = SimpleNamespace(fp8=None, fp4="e2m1", fp4_recipe=Fp4Recipe.nvfp4)
    config.use_transformer_engine_op_fuser = False
    assert padded_tokens(config) == moe_utils.get_align_size_for_quantization(config)
