"""A Transformer Engine recipe for one linear, in the terms of Megatron's precision files.

Megatron has two recipes per module (training and, where it differs, evaluation); each names an FP8
or an FP4 quantization, or neither, which is BF16. What a recipe's GEMMs run in:

    blockwise   fp8     E4M3, 1x128 tiles, 128x128 blocks of the weight
    mxfp8       mxfp8   E4M3, 1x32 tiles, power-of-two scales
    nvfp4       nvfp4   E2M1, 1x16 tiles, E4M3 scales under one FP32 scale
    bf16        bf16
    custom      one of these per GEMM, through one of our quantizer factories (te/quantizers.py)

Sources: Megatron-Core's TEQuantizationRecipe (0.16 and later), Transformer Engine's recipes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, model_validator

from megatron_snip.errors import UsageError
from megatron_snip.options import Option

FORMAT_OF_RECIPE = {"bf16": "bf16", "blockwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Recipe of one GEMM -> the number format that it runs in."""

FACTORIES = "megatron_snip.linears.te.quantizers"
"""Module of the quantizer factories of options that differ per GEMM."""

_EARLIER_FACTORIES = "megatron_snip.linears.te_factories"
"""The same module in files of earlier versions."""

_RUN_FLAGS = {
    "nvfp4": "--fp4-format e2m1",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
"""Recipe -> the flags that make it the run's own precision, from the widest padding down."""


class TERecipe(NamedTuple):
    """What one linear's three GEMMs run in: bf16, blockwise, mxfp8 or nvfp4 each."""

    fprop: str = "bf16"
    dgrad: str = "bf16"
    wgrad: str = "bf16"

    @property
    def is_uniform(self) -> bool:
        """Whether one of Transformer Engine's own recipes is enough; else it takes a factory."""
        return self.fprop == self.dgrad == self.wgrad

    def __str__(self) -> str:
        """Return the recipe as logs show it, e.g. `mxfp8` or `custom(nvfp4, mxfp8, bf16)`."""
        return self.fprop if self.is_uniform else f"custom({', '.join(self)})"

    @property
    def option(self) -> Option:
        """The option that names the formats which really run."""
        return Option(*(FORMAT_OF_RECIPE[name] for name in self))

    @property
    def factory(self) -> str:
        """Dotted path of the quantizer factory of a recipe that is not uniform."""
        return f"{FACTORIES}.{'_'.join(self)}"

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's TEQuantizationRecipe, as plain types.

        The recipe applies whatever precision the run has by default. For that both overrides must
        be set: without the second, a recipe in a BF16 run silently has no effect.
        """
        in_quantized = {"override_quantized_autocast": True}
        if self == TERecipe():
            return in_quantized  # in a BF16 run there is nothing to override
        both = {**in_quantized, "override_nonquantized_autocast": True}
        if not self.is_uniform:
            fields = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": self.factory}
        elif self.fprop == "nvfp4":
            fields = {"fp4_quantization_recipe": "nvfp4"}
        else:
            fields = {"fp8_quantization_recipe": self.fprop, "fp8_format": "e4m3"}
        return {**fields, **both}


class RecipeFields(BaseModel, extra="forbid", strict=True):
    """A recipe of a precision file: the fields of Megatron's TEQuantizationRecipe.

    Raises:
        UsageError: if it is no format of a plan.
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
        assert self.recipe
        return self

    @property
    def recipe(self) -> TERecipe:
        """What the three GEMMs run in."""
        if self.fp8_param or self.fp4_param:
            fp = "fp8" if self.fp8_param else "fp4"
            raise UsageError(
                f"{fp}_param stores weights in {fp.upper()}, which no plan can change; drop it"
            )
        fp8, fp4 = self.fp8_quantization_recipe, self.fp4_quantization_recipe
        if fp8 is not None and fp4 is not None:
            raise UsageError("an FP8 and an FP4 recipe at once; give one of them")
        name = fp8 or fp4 or "bf16"
        if name == "custom":
            return _from_factory(self.custom_recipe_factory)
        if name not in FORMAT_OF_RECIPE:
            known = ", ".join(other for other in FORMAT_OF_RECIPE if other != "bf16")
            raise UsageError(f"recipe '{name}' is no format of a plan; known: {known}")
        if fp8 is not None and self.fp8_format != "e4m3":
            raise UsageError(
                f"fp8_format '{self.fp8_format}' has E5M2 gradients, which plans do not have; use "
                "e4m3"
            )
        return TERecipe(name, name, name)

    def applies(self, run_is_quantized: bool) -> bool:
        """Return whether Megatron applies it in a run whose default is quantized or not."""
        if run_is_quantized:
            return bool(self.override_quantized_autocast)
        return bool(self.override_nonquantized_autocast)


def factory_recipe(name: str) -> TERecipe | None:
    """Return the recipe of the quantizer factory called `name`; None if there is no such one."""
    recipes = name.split("_")
    return (
        TERecipe(*recipes) if len(recipes) == 3 and set(recipes) <= set(FORMAT_OF_RECIPE) else None
    )


def _from_factory(factory: str | None) -> TERecipe:
    module, _, name = str(factory).rpartition(".")
    recipe = factory_recipe(name)
    if recipe is None or module not in (FACTORIES, _EARLIER_FACTORIES):
        raise UsageError(
            f"unknown custom_recipe_factory '{factory}'; known are those of {FACTORIES}"
        )
    return recipe


def run_flags(recipes: Iterable[TERecipe]) -> str:
    """Return Megatron's flags for the low precision that a run of such recipes needs by default.

    Megatron has one default per run. It decides what experts' tokens are padded to, so the recipe
    with the widest padding is named; modules without a recipe of their own run it. Empty for BF16
    alone.
    """
    names = {name for recipe in recipes for name in recipe}
    return next((flags for name, flags in _RUN_FLAGS.items() if name in names), "")
