"""Recipes as fields of Megatron's TEQuantizationRecipe, as Megatron itself reads them."""

import itertools
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.files import checked
from megatron_snip.linears.te.recipe import RECIPES, RecipeFields, TERecipe

EVERY = [TERecipe(*names) for names in itertools.product(RECIPES, repeat=3)]


def parsed(fields: dict[str, Any]) -> Any:
    extension = pytest.importorskip("megatron.core.extensions.transformer_engine")
    return extension.TEQuantizationRecipe.parse_from_config(fields)


def test_megatron_reads_every_recipe() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.enums import Fp4Recipe, Fp8Recipe

    for recipe in EVERY:
        read = parsed(recipe.fields())
        fp8, fp4 = read.fp8_quantization_recipe, read.fp4_quantization_recipe
        assert read.override_quantized_autocast
        if recipe == TERecipe():
            assert fp8 is None and fp4 is None
        elif not recipe.is_uniform:
            assert fp8 == Fp8Recipe.custom and fp4 is None
            assert read.custom_recipe_factory.endswith("_".join(recipe))
        elif recipe.fprop == "nvfp4":
            assert fp8 is None and fp4 == Fp4Recipe.nvfp4
        else:
            assert fp8 == Fp8Recipe(recipe.fprop) and fp4 is None
            assert read.fp8_format == "e4m3"
        # Without it a recipe in a BF16 run is silently without effect.
        assert read.override_nonquantized_autocast == (recipe != TERecipe())
        assert RecipeFields(**recipe.fields()).recipe == recipe


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"fp8_recipe": "mxfp8"}, "unknown key 'fp8_recipe' (did you mean"),
        ({"fp8_param": True}, "stores weights in FP8"),
        ({"fp4_param": True}, "stores weights in FP4"),
        ({"override_quantized_autocast": "false"}, "must be a valid boolean, got 'false'"),
        (
            {"fp8_quantization_recipe": "mxfp8", "fp4_quantization_recipe": "nvfp4"},
            "an FP8 and an FP4 recipe at once",
        ),
        ({"fp8_quantization_recipe": "tensorwise"}, "'tensorwise' is no format of a plan"),
        (
            {"fp8_quantization_recipe": "blockwise", "fp8_format": "hybrid"},
            "'hybrid' has E5M2 gradients",
        ),
        (
            {"fp8_quantization_recipe": "custom", "custom_recipe_factory": "mine.factory"},
            "unknown custom_recipe_factory 'mine.factory'",
        ),
        ({"fp4_quantization_recipe": "custom"}, "unknown custom_recipe_factory 'None'"),
    ],
)
def test_what_is_no_format_of_a_plan_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=r"^here: ") as caught:
        checked(RecipeFields, fields, "here")
    assert why in str(caught.value)


def test_false_and_absent_storage_fields_are_fine() -> None:
    fields = {"fp8_quantization_recipe": "mxfp8", "fp8_param": False, "tp_only_amax_red": True}
    assert RecipeFields(**fields).recipe == ("mxfp8",) * 3
    assert RecipeFields().recipe == TERecipe()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("overrides", itertools.product([None, False, True], repeat=2))
def test_a_recipe_applies_as_megatron_decides(
    quantized: bool, overrides: tuple[bool | None, bool | None]
) -> None:
    extension = pytest.importorskip("megatron.core.extensions.transformer_engine")
    names = ("override_quantized_autocast", "override_nonquantized_autocast")
    fields: dict[str, Any] = {
        name: value for name, value in zip(names, overrides, strict=True) if value is not None
    }
    for recipe in ({}, {"fp8_quantization_recipe": "mxfp8"}):
        truth = extension._get_should_context_be_quantized_recipe(
            parsed(fields | recipe), quantized
        )
        asked = bool(recipe) if RecipeFields(**fields | recipe).applies(quantized) else quantized
        assert asked == truth
