"""What the job itself runs a Transformer Engine linear in, before SNIP sets anything.

Megatron opens an autocast around each layer (`--fp8-format`; around most layers, `--fp4-format`),
leaves it out in the first and last layers with `--first-last-layers-bf16`, and a linear may have a
recipe of its own (`--te-precision-config-file`). SNIP leaves a module untouched while it is to run
just that.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_snip.errors import UsageError
from megatron_snip.linears.te.recipe import RecipeFields, TERecipe
from megatron_snip.linears.te.recipe_table import RECIPES, JobPrecision, recipe_of
from megatron_snip.options import Option
from megatron_snip.planning.fixed import Source
from megatron_snip.types import split_linear_name

CUSTOM = "custom"
"""A recipe of the job's that is none of `RECIPES`."""


def job_recipe(module: Any, name: str, is_fused: bool = False) -> TERecipe:
    """Return what the job runs a linear in; names that are not in `RECIPES` are `CUSTOM`.

    Args:
        module: a Transformer Engine linear that SNIP has not touched.
        name: name of the linear, in which layers are counted over all pipeline stages.
        is_fused: whether its operations are fused: a precision file does not count there.
    """
    by_default = _default_recipe(module.config, name)
    params = None if is_fused else getattr(module, "te_quant_params", None)
    if params is None:
        return _uniform(by_default)
    own = params.training_recipe
    given = {field.name: getattr(own, field.name) for field in fields(own)}
    plain = {n: getattr(v, "value", v) for n, v in given.items() if n in RecipeFields.model_fields}
    stored = {"fp8_param": False, "fp4_param": False}  # how weights are stored is seen in them
    try:
        recipe = RecipeFields(**{**plain, **stored})
    except UsageError:
        return _uniform(CUSTOM)
    return recipe.recipe if recipe.applies(by_default != "bf16") else _uniform(by_default)


def job_option(recipe: TERecipe) -> Option:
    """Return the option that stands for what a job runs; a custom recipe counts as fp8."""
    return Option(*(RECIPES[n].general_format if n in RECIPES else "fp8" for n in recipe))


def rule_of(module: Any, name: str, is_fused: bool = False) -> Source | None:
    """Return which of the job's own rules fixes what a linear runs, or None.

    Args:
        module: a linear that SNIP has not touched.
        name: name of the linear, in which layers are counted over all pipeline stages.
        is_fused: whether its operations are fused: a precision file does not count there.
    """
    # Megatron sets it where a rule matches the module's name, also where the rule asks for BF16.
    if not is_fused and getattr(module, "te_quant_params", None) is not None:
        return Source.FILE
    block, layer, _ = split_linear_name(name)
    return Source.EDGE if is_bf16_layer(getattr(module, "config", None), block, layer) else None


def file_rules(
    model: Sequence[torch.nn.Module], fused: Container[int] = frozenset()
) -> dict[str, bool]:
    """Return {rule of this rank's precision file: whether it decides for a module of this rank}.

    A rule is shown as `PATTERN (CONFIG)`. The first rule that matches a module's name decides, if
    Megatron has applied the file to the module.

    Args:
        model: Megatron's model chunks, wrapped or not; SNIP has not touched their modules.
        fused: `id` of the modules whose operations are fused: a rule does not count there.
    """
    decides: dict[str, bool] = {}
    for name, module in _named_modules(model):
        matchers = getattr(getattr(module.config, "quant_recipe", None), "matchers", ())
        texts = [f"{each.pattern} ({each.config_key})" for each in matchers]
        for text in texts:
            decides.setdefault(text, False)
        # Megatron applies it to its GPT and hybrid models alone: not to a T5 or a vision encoder.
        if getattr(module, "te_quant_params", None) is None or id(module) in fused:
            continue
        layer = re.search(r"layers\.(\d+)", name)  # as Megatron's `get_quant_config_or_none` does
        context = SimpleNamespace(module_path=name, layer_number=layer and int(layer[1]))
        for text, matcher in zip(texts, matchers, strict=True):
            if matcher.match(context) is not None:
                decides[text] = True
                break
    return decides


def _named_modules(model: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
    """Return (name that Megatron matches, module) of what rules apply to.

    A language model matches the names of its modules in itself, also where it is a part of a model
    with a vision encoder.
    """
    found: dict[int, tuple[str, Any]] = {}
    for chunk in model:
        inner: Any = chunk
        while isinstance(getattr(inner, "module", None), torch.nn.Module):  # DDP's, for example
            inner = inner.module
        owners = [each for each in inner.modules() if isinstance(each, LanguageModule)]
        for owner in (inner, *owners):  # the last one that holds a module names it
            for name, module in owner.named_modules():
                if hasattr(module, "finish_init") and hasattr(module, "config"):
                    found[id(module)] = (name, module)
    return list(found.values())


def _uniform(name: str) -> TERecipe:
    return TERecipe(name, name, name)


def _default_recipe(config: Any, name: str) -> str:
    job = JobPrecision.of(config)
    block, layer, _ = split_linear_name(name)
    if not job.kind or is_bf16_layer(config, block, layer):
        return "bf16"
    if job.kind == "fp4" and not _opens_fp4(config, block):
        return "bf16"
    return recipe_of(job) or CUSTOM


def _opens_fp4(config: Any, block: str) -> bool:
    """Return whether Megatron runs a block's linears in `--fp4-format`.

    Every transformer block opens a context of FP8, but some open none of FP4: their layers run
    BF16. What a module of Megatron opens is seen in what it imports.

    Args:
        config: the settings of the block's layers.
        block: the block.
    """
    if block == "mtp":
        return False
    if getattr(config, "is_hybrid_model", False):  # Megatron-Core 0.16 sets it
        from megatron.core.ssm import mamba_block

        return hasattr(mamba_block, "get_fp4_context")
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        from megatron.core.models.common import model_chunk_schedule_plan

        # It opens FP8 by itself, or else asks the layer for what the layer needs.
        return not hasattr(model_chunk_schedule_plan, "get_fp8_context")
    return True


def is_bf16_layer(config: Any, block: str, layer: int) -> bool:
    """Return whether Megatron's `--first-last-layers-bf16` keeps a layer in BF16.

    Args:
        config: the settings of the layer: the encoder of a T5 has its own, with its own number of
            layers.
        block: the layer's transformer block.
        layer: its 0-based index over all stages.
    """
    if not getattr(config, "first_last_layers_bf16", False):
        return False
    # Megatron opens FP8 around all layers of multi-token prediction, also around a hybrid stack in
    # one, whose layers are a block of their own (`mtp.layers.0.mtp_model_layer`).
    if block == "mtp" or (block.startswith("mtp.") and JobPrecision.of(config).kind == "fp8"):
        return False
    first = int(config.num_layers_at_start_in_bf16)
    last = int(config.num_layers) - int(config.num_layers_at_end_in_bf16)
    return layer < first or layer >= last
