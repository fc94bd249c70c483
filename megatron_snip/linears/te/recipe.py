"""A Transformer Engine recipe for one linear, in the terms of Megatron's precision files.

Megatron has a recipe per module for training and, where it differs, one for evaluation. A recipe
names an FP8 or an FP4 quantization; without one the module runs BF16. With `custom` each GEMM has
one of `RECIPES` (te/recipe_table.py), through one of our quantizer factories (te/quantizers.py).

Source: Megatron-Core's TEQuantizationRecipe (0.16 and later).
"""

import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, model_validator

from megatron_snip.errors import UsageError
from megatron_snip.linears.te.recipe_table import RECIPES, JobPrecision, recipe_of
from megatron_snip.options import Option

FACTORIES = "megatron_snip.linears.te.quantizers"
"""Module of the quantizer factories of options that differ per GEMM."""


class TERecipe(NamedTuple):
    """Names in `RECIPES` for the three GEMMs of a linear."""

    fprop: str = "bf16"
    dgrad: str = "bf16"
    wgrad: str = "bf16"

    @property
    def is_uniform(self) -> bool:
        """Whether one of Transformer Engine's own recipes is enough; else it needs a factory."""
        return self.fprop == self.dgrad == self.wgrad

    def __str__(self) -> str:
        """Return the recipe as logs show it, e.g. `mxfp8` or `custom(nvfp4, mxfp8, bf16)`."""
        return self.fprop if self.is_uniform else f"custom({', '.join(self)})"

    @property
    def option(self) -> Option:
        """The option that names the formats which really run."""
        return Option(*(RECIPES[name].exact_format for name in self))

    @property
    def factory(self) -> str:
        """Dotted path of the quantizer factory of a recipe that is not uniform."""
        return f"{FACTORIES}.{'_'.join(self)}"

    @property
    def follows_the_job(self) -> bool:
        """Whether it is the job's own recipe, in the autocast that Megatron itself opens."""
        return self.is_uniform and RECIPES[self.fprop].has_history

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's TEQuantizationRecipe, as plain types.

        The recipe applies whatever precision the run has by default. For that both overrides must
        be set: without the second, a recipe in a BF16 run silently has no effect.
        """
        if self.follows_the_job:
            return {"override_quantized_autocast": False}
        in_quantized = {"override_quantized_autocast": True}
        if self == BF16_RECIPE:
            return in_quantized  # in a BF16 run there is nothing to override
        if self.is_uniform:
            fields = RECIPES[self.fprop].precision.fields()
        else:
            fields = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": self.factory}
        return {**fields, **in_quantized, "override_nonquantized_autocast": True}


BF16_RECIPE = TERecipe()
"""All three GEMMs in BF16."""


def storage_fields(recipe: TERecipe) -> dict[str, bool]:
    """Return the fields of TEQuantizationRecipe that store a weight as its GEMMs multiply it.

    A weight is stored in FP8 or FP4 where all three GEMMs run that, and in BF16 elsewhere.
    """
    kind = RECIPES[recipe.fprop].precision.kind if recipe.is_uniform else ""
    return {"fp8_param": kind == "fp8", "fp4_param": kind == "fp4"}


class RecipeFields(BaseModel, extra="forbid", strict=True):
    """A recipe of a precision file: the fields of Megatron's TEQuantizationRecipe.

    Raises:
        UsageError: if no plan can have the recipe.
    """

    fp8_quantization_recipe: str | None = None
    fp4_quantization_recipe: str | None = None
    custom_recipe_factory: str | None = None
    fp8_format: str | None = "e4m3"
    override_quantized_autocast: bool | None = True
    override_nonquantized_autocast: bool | None = False
    tp_only_amax_red: bool | None = False
    fp8_param: bool | None = None  # Megatron-Core 0.18 and later
    fp4_param: bool | None = None

    @model_validator(mode="after")
    def _is_a_format(self) -> Self:
        follows_the_job = not self.override_quantized_autocast
        for field, is_stored in storage_fields(self.recipe).items():
            if getattr(self, field) and not (is_stored or follows_the_job):
                name = field.partition("_")[0].upper()
                raise UsageError(
                    f"{field} stores weights in {name}, and this recipe does not run all three "
                    "GEMMs in it; drop it"
                )
        return self

    @property
    def recipe(self) -> TERecipe:
        """What the three GEMMs run in."""
        fp8, fp4 = self.fp8_quantization_recipe, self.fp4_quantization_recipe
        if fp8 is not None and fp4 is not None:
            raise UsageError("an FP8 and an FP4 recipe at once; give one of them")
        if "custom" in (fp8, fp4):
            return _from_factory(self.custom_recipe_factory)
        asked = JobPrecision()
        if fp8 is not None:
            asked = JobPrecision("fp8", str(self.fp8_format), fp8)
        elif fp4 is not None:
            asked = JobPrecision("fp4", "e2m1", fp4)
        name = recipe_of(asked)
        if not name or RECIPES[name].has_history:
            precisions = (each.precision for each in RECIPES.values() if not each.has_history)
            known = ", ".join(f"{run.recipe} ({run.format})" for run in precisions if run.kind)
            raise UsageError(
                f"recipe '{asked.recipe}' ({asked.format}) is no format of a plan; known: {known}"
            )
        return TERecipe(name, name, name)

    def applies(self, job_is_quantized: bool) -> bool:
        """Return whether Megatron applies it in a run whose default is quantized or not."""
        if job_is_quantized:
            return bool(self.override_quantized_autocast)
        return bool(self.override_nonquantized_autocast)


def factory_recipe(name: str) -> TERecipe | None:
    """Return the recipe of our quantizer factory `name`, e.g. `nvfp4_mxfp8_bf16`, or None."""
    return _factory_recipes().get(name)


@cache
def _factory_recipes() -> dict[str, TERecipe]:
    names = [name for name, recipe in RECIPES.items() if recipe.per_gemm]
    return {"_".join(each): TERecipe(*each) for each in itertools.product(names, repeat=3)}


def _from_factory(factory: str | None) -> TERecipe:
    module, _, name = str(factory).rpartition(".")
    recipe = factory_recipe(name)
    if recipe is None or module != FACTORIES:
        raise UsageError(
            f"unknown custom_recipe_factory '{factory}'; known are those of {FACTORIES}"
        )
    return recipe


def needed_precision(recipes: Iterable[TERecipe]) -> JobPrecision:
    """Return the low precision that a run of such recipes needs by default.

    Megatron has one default per run; modules without a recipe of their own run it. It decides what
    experts' tokens are padded to, so the recipe with the widest padding is named; but delayed
    scaling can only be the run's own. It is BF16 if all recipes are.
    """
    used = [RECIPES[name] for recipe in recipes for name in recipe]
    widest = max(
        used, key=lambda one: (one.has_history, one.token_multiple), default=RECIPES["bf16"]
    )
    return widest.precision
