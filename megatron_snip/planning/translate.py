"""A plan under the names of torchtitan, and under those of Hugging Face models (ModelOpt, vLLM).

Both split Megatron's fused linears: `linear_qkv` into query, key and value, `linear_fc1` into gate
and up projection. Routed experts and multi-token prediction have no linears of their own there.

Sources: torchtitan's state_dict_adapter.py of Llama 3 and DeepSeek V3 (0.2.2 has wq, wk and wv
without `qkv_linear`), ModelOpt 0.47's `process_layer_quant_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_snip.options import BF16, Option
from megatron_snip.planning.planner import nearest_option
from megatron_snip.types import split_linear_name
from megatron_snip.version import __version__

_PARENTS = {
    "self_attention": ("attention", "self_attn"),
    "mlp": ("feed_forward", "mlp"),
    "mlp.shared_experts": ("moe.shared_experts", "mlp.shared_experts"),
}
_LINEARS = {
    "linear_qkv": ("qkv_linear wq wk wv", "q_proj k_proj v_proj"),
    "linear_q_proj": ("wq", "q_proj"),
    "linear_q_down_proj": ("wq_a", "q_a_proj"),
    "linear_q_up_proj": ("wq_b", "q_b_proj"),
    "linear_kv_down_proj": ("wkv_a", "kv_a_proj_with_mqa"),
    "linear_kv_up_proj": ("wkv_b", "kv_b_proj"),
    "linear_proj": ("wo", "o_proj"),
    "linear_fc1": ("w1 w3", "gate_proj up_proj"),
    "linear_fc2": ("w2", "down_proj"),
}
"""Megatron's name -> torchtitan's and Hugging Face's."""

_CONVERTERS = {"fp8": "float8", "mxfp8": "mxfp8", "fp4": "nvfp4", "nvfp4": "nvfp4"}
_NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_algo": "FP8"},
    "mxfp8": {"quant_algo": "MXFP8", "group_size": 32},
    "fp4": _NVFP4,
    "nvfp4": _NVFP4,
}
_NEVER_PLANNED = ("output", "lm_head", "router.gate")


def torchtitan_filters(
    linears: Mapping[str, Option],
) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """Return the name lists of torchtitan's converters, and what had to be exchanged.

    torchtitan and torchao convert a linear whose fully qualified name contains an entry of `fqns`
    (mxfp8, nvfp4), or none of `filter_fqns` (float8).

    Args:
        linears: option of each linear, by Megatron's global name.

    Returns:
        ({converter: keyword arguments of its Config}, texts); converters without a linear are left
        out, because an empty `fqns` would convert every linear.

    Raises:
        UsageError: if a name is no linear's.
    """
    formats, changes = _renamed(linears, 0, "layers", _CONVERTERS)
    converters = {name: _CONVERTERS.get(fmt) for name, fmt in formats.items()}
    lists = {}
    for converter in ("mxfp8", "nvfp4"):
        names = [name for name, other in converters.items() if other == converter]
        if names:
            lists[converter] = {"fqns": names}
    if "float8" in converters.values():
        names = [name for name, other in converters.items() if other != "float8"]
        lists["float8"] = {"filter_fqns": [*names, *_NEVER_PLANNED]}
    return lists, changes


def modelopt_config(linears: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Return the content of ModelOpt's `hf_quant_config.json`, and what had to be exchanged.

    Serving runs the forward pass, so each linear gets its format of fprop.

    Args:
        linears: option of each linear, by Megatron's global name.

    Raises:
        UsageError: if a name is no linear's.
    """
    forward = {name: Option.uniform(option.fprop) for name, option in linears.items()}
    formats, changes = _renamed(forward, 1, "model.layers", _ALGORITHMS)
    layers = {name: _ALGORITHMS[fmt] for name, fmt in formats.items() if fmt in _ALGORITHMS}
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": layers,
    }
    producer = {"name": "megatron-snip", "version": __version__}
    return {"producer": producer, "quantization": quantization}, changes


def _renamed(
    linears: Mapping[str, Option], column: int, prefix: str, known: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the format of each linear by its new names, and what was exchanged."""
    candidates = [Option.uniform(name) for name in known]
    found: dict[str, str] = {}
    changes: dict[str, None] = {}
    for name, option in linears.items():
        block, layer, module = split_linear_name(name)
        parent, _, linear = module.rpartition(".")
        if block == "decoder" and parent in _PARENTS and linear in _LINEARS:
            what, instead = f"{option}", nearest_option(option, candidates)
            for other in _LINEARS[linear][column].split():
                found[f"{prefix}.{layer}.{_PARENTS[parent][column]}.{other}"] = instead.fprop
        else:
            what, instead = f"{option} of {block} {module}", BF16
        if instead != option:
            changes[f"{what} becomes {instead}"] = None
    return found, list(changes)
