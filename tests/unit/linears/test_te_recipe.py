"""Transformer Engine's recipes: as Megatron reads their fields, and the shapes that they accept."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.extensions import transformer_engine as extension
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_snip.errors import UsageError
from megatron_snip.files import checked
from megatron_snip.linears.te.recipe import RecipeFields, TERecipe, needed_precision
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.linears.te.refusals import padded_tokens, shape_refusal

PER_GEMM = [name for name, recipe in RECIPES.items() if recipe.per_gemm]
EVERY = [TERecipe(*names) for names in itertools.product(PER_GEMM, repeat=3)]


def parsed(fields: dict[str, Any]) -> Any:
    return extension.TEQuantizationRecipe.parse_from_config(fields)


def test_megatron_reads_every_recipe() -> None:
    for recipe in EVERY:
        read = parsed(recipe.fields())
        fp8, fp4 = read.fp8_quantization_recipe, read.fp4_quantization_recipe
        run = RECIPES[recipe.fprop].precision
        assert read.override_quantized_autocast
        if recipe == TERecipe():
            assert fp8 is None and fp4 is None
        elif not recipe.is_uniform:
            assert fp8 == Fp8Recipe.custom and fp4 is None
            assert read.custom_recipe_factory.endswith("_".join(recipe))
        elif run.kind == "fp4":
            assert fp8 is None and fp4 == Fp4Recipe(run.recipe)
        else:
            assert fp8 == Fp8Recipe(run.recipe) and fp4 is None
            assert read.fp8_format == run.format
        # Without it a recipe in a BF16 run is silently without effect.
        assert read.override_nonquantized_autocast == (recipe != TERecipe())
        assert RecipeFields(**recipe.fields()).recipe == recipe


@pytest.mark.parametrize("name", ["delayed", "delayed_hybrid"])
def test_delayed_scaling_is_left_to_the_run_s_own_autocast(name: str) -> None:
    """Megatron's files do not have it, and its history belongs to the run's recipe."""
    recipe = TERecipe(name, name, name)
    assert recipe.follows_the_job and not parsed(recipe.fields()).override_quantized_autocast
    read = RecipeFields(**recipe.fields())
    assert not any(read.applies(job_is_quantized=quantized) for quantized in (False, True))
    assert (
        needed_precision([recipe, TERecipe("nvfp4", "nvfp4", "nvfp4")]) == RECIPES[name].precision
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"fp8_recipe": "mxfp8"}, "unknown key 'fp8_recipe' (did you mean"),
        ({"fp8_param": True}, "stores weights in FP8"),
        ({"fp4_param": True}, "stores weights in FP4"),
        ({"fp8_quantization_recipe": "mxfp8", "fp4_param": True}, "stores weights in FP4"),
        ({"override_quantized_autocast": "false"}, "must be a valid boolean, got 'false'"),
        (
            {"fp8_quantization_recipe": "mxfp8", "fp4_quantization_recipe": "nvfp4"},
            "an FP8 and an FP4 recipe at once",
        ),
        ({"fp8_quantization_recipe": "delayed"}, "'delayed' (e4m3) is no format of a plan; known"),
        (
            {"fp8_quantization_recipe": "blockwise", "fp8_format": "e5m2"},
            "'blockwise' (e5m2) is no format of a plan; known: blockwise (e4m3), mxfp8 (e4m3),",
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


def te_linear(rows: int, cols: int, **config: Any) -> Any:
    weight = torch.empty(rows, cols, device="meta")
    return SimpleNamespace(weight=weight, config=SimpleNamespace(**config))


def accepted(module: Any, is_expert: bool = False) -> set[str]:
    names = {"bf16", "blockwise", "mxfp8", "nvfp4", "tensorwise"}
    return {n for n in names if shape_refusal(module, is_expert, TERecipe(n, n, n)) is None}


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((128, 128), {"bf16", "blockwise", "mxfp8", "nvfp4", "tensorwise"}),
        ((48, 128), {"bf16", "blockwise", "tensorwise"}),
        ((128, 48), {"bf16", "blockwise", "tensorwise"}),
        ((96, 40), {"bf16"}),
    ],
)
def test_both_dimensions_of_a_shard_must_be_multiples(
    shape: tuple[int, int], names: set[str]
) -> None:
    assert accepted(te_linear(*shape)) == names


def test_the_largest_multiple_of_a_mixed_recipe_counts() -> None:
    module = te_linear(48, 48)
    assert shape_refusal(module, False, TERecipe("blockwise", "bf16", "bf16")) is None
    refusal = shape_refusal(module, False, TERecipe("blockwise", "bf16", "mxfp8"))
    assert refusal is not None and "(48, 48)" in refusal and "mxfp8" in refusal


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"fp8": None, "fp4": None}, {"bf16"}),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, {"bf16", "blockwise", "tensorwise"}),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, {"bf16", "blockwise", "tensorwise"}),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"bf16", "blockwise", "mxfp8", "tensorwise"}),
        ({"fp4": "e2m1"}, {"bf16", "blockwise", "mxfp8", "nvfp4", "tensorwise"}),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "use_transformer_engine_op_fuser": True},
            {"bf16", "blockwise", "mxfp8", "nvfp4", "tensorwise"},
        ),
        ({"fp8": None, "use_transformer_engine_op_fuser": True}, {"bf16"}),
    ],
)
def test_experts_run_what_their_tokens_are_padded_for(
    config: dict[str, Any], names: set[str]
) -> None:
    module = te_linear(128, 128, **config)
    every = {"bf16", "blockwise", "mxfp8", "nvfp4", "tensorwise"}
    assert accepted(module) == every  # a dense linear's tokens are not padded
    assert accepted(module, is_expert=True) == names


def test_padding_is_megatron_s_own() -> None:
    """The numbers are those of the installed Megatron-Core; the recipe is an enum there."""
    names = (Fp8Recipe.tensorwise, Fp8Recipe.blockwise, Fp8Recipe.mxfp8, Fp8Recipe.delayed)
    cases: list[dict[str, Any]] = [
        {"fp8": "e4m3", "fp8_recipe": recipe, "fp4": None}
        for name in names
        for recipe in (name, str(name.value))
    ]
    # Experts with fused operations are in Megatron-Core from 0.18 on.
    may_fuse = hasattr(TransformerConfig, "use_transformer_engine_op_fuser")
    every = [*cases, {"fp8": None, "fp4": "e2m1", "fp4_recipe": Fp4Recipe.nvfp4}]
    for case, is_fused in itertools.product(every, {False, may_fuse}):
        config = SimpleNamespace(**case, use_transformer_engine_op_fuser=is_fused)
        assert padded_tokens(config) == moe_utils.get_align_size_for_quantization(config)
