"""What the job itself runs a Transformer Engine linear in, before SNIP sets anything.

Megatron opens an autocast around each layer (`--fp8-format`, `--fp4-format`), leaves it out in the
first and last layers with `--first-last-layers-bf16`, and a linear may have a recipe of its own
(`--te-precision-config-file`). SNIP leaves a module untouched while it is to run just that.
"""

from dataclasses import fields
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.linears.te.recipe import RECIPES, RecipeFields, TERecipe
from megatron_snip.options import Option
from megatron_snip.types import split_linear_name


def job_recipe(module: Any, name: str) -> TERecipe:
    """Return what the job runs a linear in.

    The names are Megatron's, so there may be some that are not in `RECIPES`, such as `custom`.

    Args:
        module: a Transformer Engine linear that SNIP has not touched.
        name: of the linear, in which layers are counted over all pipeline stages.
    """
    by_default = _default_recipe(module.config, name)
    params = getattr(module, "te_quant_params", None)
    if params is None:
        return _uniform(by_default)
    own = params.training_recipe
    known = {each.name: getattr(own, each.name) for each in fields(own)}
    given = {n: getattr(v, "value", v) for n, v in known.items() if n in RecipeFields.model_fields}
    stored = {"fp8_param": False, "fp4_param": False}  # how weights are stored is seen in them
    try:
        recipe = RecipeFields(**{**given, **stored})
        found = recipe.recipe
    except UsageError:
        return _uniform(str(given.get("fp8_quantization_recipe") or "custom"))
    return found if recipe.applies(by_default != "bf16") else _uniform(by_default)


def job_option(recipe: TERecipe) -> Option:
    """Return the option of a plan that stands for what a job runs; a custom recipe counts as fp8.

    Of several formats with one recipe it is the general one: fp8 and not mxfp8.
    """
    return Option(*(RECIPES[n].formats[0] if n in RECIPES else "fp8" for n in recipe))


def _uniform(name: str) -> TERecipe:
    return TERecipe(name, name, name)


def _default_recipe(config: Any, name: str) -> str:
    if _is_bf16_layer(config, name):
        return "bf16"
    if getattr(config, "fp4", None):
        return _value(getattr(config, "fp4_recipe", "nvfp4"))
    if getattr(config, "fp8", None):
        return _value(getattr(config, "fp8_recipe", "delayed"))
    return "bf16"


def _is_bf16_layer(config: Any, name: str) -> bool:
    block, layer, _ = split_linear_name(name)
    if not getattr(config, "first_last_layers_bf16", False) or block != "decoder":
        return False
    first = int(config.num_layers_at_start_in_bf16)
    last = int(config.num_layers) - int(config.num_layers_at_end_in_bf16)
    return layer < first or layer >= last


def _value(recipe: Any) -> str:
    """Return e.g. `mxfp8` of Megatron's enum or text."""
    return str(getattr(recipe, "value", recipe))
