"""A plan in the names and formats of torchtitan, and of ModelOpt for Hugging Face models.

Both split Megatron's fused linears: `linear_qkv` into query, key and value, `linear_fc1` into gate
and up projection. There are no names for routed experts and multi-token prediction. Sources:
torchtitan's state_dict_adapter.py of Llama 3 and DeepSeek V3 (0.2.2 has wq, wk and wv without
`qkv_linear`), ModelOpt 0.47's `process_layer_quant_config`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_snip.linears.te.recipe_table import RECIPES, GemmRecipe
from megatron_snip.options import BF16, Option, nearest_option
from megatron_snip.types import split_linear_name
from megatron_snip.version import __version__


class _Names(NamedTuple):
    """What another program calls layers, the parts of a layer, and linears (by Megatron's name)."""

    layers: str
    parents: Mapping[str, str]
    linears: Mapping[str, tuple[str, ...]]


_TORCHTITAN = _Names(
    layers="layers",
    parents={
        "self_attention": "attention",
        "mlp": "feed_forward",
        "mlp.shared_experts": "moe.shared_experts",
    },
    linears={
        # torchtitan has `wq`, `wk` and `wv` up to 0.2.2, and `qkv_linear` later. Both are listed: a
        # name that a model does not have matches nothing.
        "linear_qkv": ("qkv_linear", "wq", "wk", "wv"),
        "linear_q_proj": ("wq",),
        "linear_q_down_proj": ("wq_a",),
        "linear_q_up_proj": ("wq_b",),
        "linear_kv_down_proj": ("wkv_a",),
        "linear_kv_up_proj": ("wkv_b",),
        "linear_proj": ("wo",),
        "linear_fc1": ("w1", "w3"),
        "linear_fc2": ("w2",),
    },
)
_HUGGING_FACE = _Names(
    layers="model.layers",
    parents={
        "self_attention": "self_attn",
        "mlp": "mlp",
        "mlp.shared_experts": "mlp.shared_experts",
    },
    linears={
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_q_proj": ("q_proj",),
        "linear_q_down_proj": ("q_a_proj",),
        "linear_q_up_proj": ("q_b_proj",),
        "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
        "linear_kv_up_proj": ("kv_b_proj",),
        "linear_proj": ("o_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
    },
)


def _known_recipes() -> dict[str, GemmRecipe]:
    """Return {format: its first recipe} of the formats that torchtitan and ModelOpt have."""
    known: dict[str, GemmRecipe] = {}
    for recipe in RECIPES.values():
        if recipe.converter:
            for name in recipe.formats:
                known.setdefault(name, recipe)
    return known


_KNOWN_RECIPES = _known_recipes()
_TORCHTITAN_CONVERTERS = {name: recipe.converter for name, recipe in _KNOWN_RECIPES.items()}
"""torchtitan's converter, by the format."""
_MODELOPT_PARAMETERS = {name: recipe.modelopt for name, recipe in _KNOWN_RECIPES.items()}
"""ModelOpt's parameters of a layer, by the format."""


def torchtitan_filters(linears: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Return {converter: keyword arguments of its Config}, and a line for each replaced option.

    torchtitan and torchao convert a linear whose fully qualified name contains an entry of `fqns`
    (all converters but float8), or none of `filter_fqns` (float8). Converters without a linear are
    left out, because an empty `fqns` would convert every linear. Output layer and routers are never
    planned.
    """
    formats, changes = _renamed(linears, _TORCHTITAN)
    converters = {name: _TORCHTITAN_CONVERTERS.get(fmt) for name, fmt in formats.items()}
    used = {converter for converter in converters.values() if converter is not None}
    lists = {}
    for converter in sorted(used - {"float8"}):
        names = [name for name, own in converters.items() if own == converter]
        lists[converter] = {"fqns": names}
    if "float8" in used:
        names = [name for name, own in converters.items() if own != "float8"]
        lists["float8"] = {"filter_fqns": [*names, "output", "lm_head", "router.gate"]}
    return lists, changes


def modelopt_config(linears: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Return the content of `hf_quant_config.json`, and a line for each replaced option.

    Serving runs the forward pass, so each linear gets its format of fprop.
    """
    forward = {name: Option.uniform(option.fprop) for name, option in linears.items()}
    formats, changes = _renamed(forward, _HUGGING_FACE)
    layers = {}
    for name, fmt in formats.items():
        if fmt in _MODELOPT_PARAMETERS:  # not BF16
            layers[name] = _MODELOPT_PARAMETERS[fmt]
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": layers,
    }
    producer = {"name": "megatron-snip", "version": __version__}
    return {"producer": producer, "quantization": quantization}, changes


def _renamed(linears: Mapping[str, Option], names: _Names) -> tuple[dict[str, str], list[str]]:
    """Return {new name: format, which may be bf16}, and a line for each replaced option.

    Args:
        linears: Option of each linear, by Megatron's name.
        names: What the other program calls layers, parts of a layer and linears.
    """
    candidates = [Option.uniform(name) for name in _KNOWN_RECIPES]
    found: dict[str, str] = {}
    changes: dict[str, None] = {}
    for name, option in linears.items():
        block, layer, module = split_linear_name(name)
        parent, _, linear = module.rpartition(".")
        if block == "decoder" and parent in names.parents and linear in names.linears:
            what = str(option)
            instead = nearest_option(option, candidates)
            for other in names.linears[linear]:
                new_name = f"{names.layers}.{layer}.{names.parents[parent]}.{other}"
                found[new_name] = instead.fprop
        else:  # the other program has no name for this linear
            what = f"{option} of {block} {module}"
            instead = BF16
        if instead != option:
            changes[f"{what} becomes {instead}"] = None
    return found, list(changes)
