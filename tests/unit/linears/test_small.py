"""Linears in which a low format may be slower than BF16."""

import pytest

from megatron_snip.linears.availability import small_linears
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.topology import Axis, LinearKind, Placement

Shape = tuple[int, int, LinearKind]

LLAMA_70B: dict[str, Shape] = {
    "self_attention.linear_qkv": (10240, 8192, "column"),
    "self_attention.linear_proj": (8192, 8192, "row"),
    "mlp.linear_fc1": (57344, 8192, "column"),
    "mlp.linear_fc2": (8192, 28672, "row"),
    "mlp.experts.linear_fc2": (1024, 512, "row"),
}
"""(N, K, which of them is sharded)."""


def small(recipe: str, num_shards: int, shapes: dict[str, Shape]) -> dict[str, str]:
    found = {}
    for name, (n, k, kind) in shapes.items():
        place = Placement(f"decoder.layers.0.{name}", 0, kind, k, n, Axis(size=num_shards))
        found |= small_linears({place.name: place.shard_shape}, recipe)
    return {name.rpartition(".")[2]: why for name, why in found.items()}


@pytest.mark.parametrize("recipe", [name for name, each in RECIPES.items() if each.small_shapes])
def test_the_shard_of_a_rank_counts(recipe: str) -> None:
    """With 8 ranks qkv has N 1280 and the projection has K 1024."""
    assert small(recipe, 1, LLAMA_70B) == small(recipe, 4, LLAMA_70B) == {}
    has_one_scale = recipe.startswith(("tensorwise", "delayed"))
    assert small(recipe, 8, LLAMA_70B) == (
        {}
        if has_one_scale
        else {
            "linear_qkv": "N 1280, K 8192 on a rank (N <= 2048)",
            "linear_proj": "N 8192, K 1024 on a rank (K <= 1024)",
        }
    )


def test_one_scale_per_tensor_is_slower_in_the_smallest_only() -> None:
    kv: dict[str, Shape] = {"self_attention.linear_kv": (1024, 4096, "column")}
    why = "N 1024, K 4096 on a rank (N <= 1024 and K <= 4096)"
    assert small("tensorwise", 1, kv) == {"linear_kv": why}
    assert small("tensorwise", 1, {"self_attention.linear_kv": (1024, 4112, "column")}) == {}
    assert small("bf16", 8, LLAMA_70B) == {}
    assert set(RECIPES) - {"bf16"} == {name for name, each in RECIPES.items() if each.small_shapes}
