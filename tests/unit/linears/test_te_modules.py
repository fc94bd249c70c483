"""Which shapes suit which recipe, and what Megatron pads experts' tokens to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_snip.linears.te_shapes import TOKEN_GROUP, padded_tokens, unfit
from megatron_snip.planning.te_recipe import TERecipe

from megatron_snip.topology import Placement

NAME = "decoder.layers.0.mlp.experts.linear_fc1"


def linear(rows: int, columns: int, **config: Any) -> Any:
    return SimpleNamespace(
        weight=torch.empty(rows, columns, device="meta"), config=SimpleNamespace(**config)
    )


def uniform(word: str) -> TERecipe:
    return TERecipe(word, word, word)


def place(expert: int | None = None) -> Placement:
    return Placement(NAME, 0, "column", 1, 1, expert=expert)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((128, 128), {"bf16", "blockwise", "mxfp8", "nvfp4"}),
        ((48, 128), {"bf16", "blockwise"}),
        ((128, 48), {"bf16", "blockwise"}),
        ((96, 40), {"bf16"}),
        ((7, 5), {"bf16"}),
    ],
)
def test_both_dimensions_of_a_shard_come_in_groups(shape: tuple[int, int], fits: set[str]) -> None:
    for word in TOKEN_GROUP:
        reason = unfit(linear(*shape), place(), uniform(word))
        assert (reason is None) == (word in fits)
        if reason is not None:
            assert str(shape) in reason and word in reason


def test_the_coarsest_group_of_a_mixed_recipe_counts() -> None:
    module = linear(48, 48)
    assert unfit(module, place(), TERecipe("blockwise", "bf16", "bf16")) is None
    assert unfit(module, place(), TERecipe("blockwise", "bf16", "mxfp8")) is not None


@pytest.mark.parametrize(
    ("config", "padded", "fits"),
    [
        ({}, 0, {"bf16"}),
        ({"fp8": None, "fp4": None}, 0, {"bf16"}),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16, {"bf16", "blockwise"}),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 16, {"bf16", "blockwise"}),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32, {"bf16", "blockwise", "mxfp8"}),
        ({"fp4": "e2m1"}, 128, {"bf16", "blockwise", "mxfp8", "nvfp4"}),
    ],
)
def test_experts_run_what_their_tokens_are_padded_to(
    config: dict[str, Any], padded: int, fits: set[str]
) -> None:
    module = linear(128, 128, **config)
    assert padded_tokens(module.config) == padded
    for word in TOKEN_GROUP:
        assert unfit(module, place(), uniform(word)) is None  # a dense linear's tokens are even
        reason = unfit(module, place(expert=3), uniform(word))
        assert (reason is None) == (word in fits)
        if reason is not None:
            assert f"multiples of {TOKEN_GROUP[word]}" in reason
            assert ("not padded" if padded == 0 else f"padded to {padded}") in reason


def test_padding_is_megatrons_own() -> None:
    """The numbers are those of the installed Megatron-Core; the recipe is an enum there."""
    moe = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    from megatron.core.enums import Fp4Recipe, Fp8Recipe

    for fp8 in (Fp8Recipe.tensorwise, Fp8Recipe.blockwise, Fp8Recipe.mxfp8, Fp8Recipe.delayed):
        for recipe in (fp8, str(fp8.value)):
            config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe, fp4=None)
            config.use_transformer_engine_op_fuser = False
            assert padded_tokens(config) == moe.get_align_size_for_quantization(config)
    config = SimpleNamespace(fp8=None, fp4="e2m1", fp4_recipe=Fp4Recipe.nvfp4)
    config.use_transformer_engine_op_fuser = False
    assert padded_tokens(config) == moe.get_align_size_for_quantization(config)
