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

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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

_FP8 = "fp8_quantization_recipe"
_FP4 = "fp4_quantization_recipe"
_FACTORY = "custom_recipe_factory"
_IN_QUANTIZED = "override_quantized_autocast"
_IN_BF16 = "override_nonquantized_autocast"
_KNOWN = {_FP8, _FP4, _FACTORY, _IN_QUANTIZED, _IN_BF16, "fp8_format", "tp_only_amax_red"}
_STORED = {"fp8_param": "FP8", "fp4_param": "FP4"}
"""Fields of Megatron-Core 0.18 and later that store the weight itself in low precision."""


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
        if self == TERecipe():
            return {_IN_QUANTIZED: True}  # in a BF16 run there is nothing to override
        both: dict[str, Any] = {_IN_QUANTIZED: True, _IN_BF16: True}
        if not self.is_uniform:
            return {_FP8: "custom", _FACTORY: self.factory, **both}
        if self.fprop == "nvfp4":
            return {_FP4: "nvfp4", **both}
        return {_FP8: self.fprop, "fp8_format": "e4m3", **both}


def recipe_from_fields(fields: Mapping[str, Any], where: str) -> TERecipe:
    """Read what `TERecipe.fields` (or a user) wrote.

    Args:
        fields: of one recipe.
        where: name of the recipe in error messages.

    Raises:
        UsageError: for an unknown field, or a recipe that is no format of a plan.
    """
    unknown = sorted(set(fields) - _KNOWN - set(_STORED), key=str)
    if unknown:
        raise UsageError(f"{where}: unknown field '{unknown[0]}'")
    for name, stored in _STORED.items():
        if fields.get(name):
            raise UsageError(
                f"{where}: {name} stores weights in {stored}, which no plan can change; drop it"
            )
    fp8, fp4 = fields.get(_FP8), fields.get(_FP4)
    if fp8 is not None and fp4 is not None:
        raise UsageError(f"{where}: an FP8 and an FP4 recipe at once; give one of them")
    if "custom" in (fp8, fp4):
        return _from_factory(fields.get(_FACTORY), where)
    name = str(fp8 or fp4 or "bf16")
    if name not in FORMAT_OF_RECIPE:
        known = ", ".join(other for other in FORMAT_OF_RECIPE if other != "bf16")
        raise UsageError(f"{where}: recipe '{name}' is no format of a plan; known: {known}")
    if fp8 is not None and fields.get("fp8_format", "e4m3") != "e4m3":
        raise UsageError(
            f"{where}: fp8_format '{fields['fp8_format']}' has E5M2 gradients, which plans do "
            "not have; use e4m3"
        )
    return TERecipe(name, name, name)


def factory_recipe(name: str) -> TERecipe | None:
    """Return the recipe of the quantizer factory called `name`; None if there is no such one."""
    recipes = name.split("_")
    return (
        TERecipe(*recipes) if len(recipes) == 3 and set(recipes) <= set(FORMAT_OF_RECIPE) else None
    )


def _from_factory(factory: Any, where: str) -> TERecipe:
    module, _, name = str(factory).rpartition(".")
    recipe = factory_recipe(name)
    if recipe is None or module not in (FACTORIES, _EARLIER_FACTORIES):
        raise UsageError(
            f"{where}: unknown custom_recipe_factory '{factory}'; known are those of {FACTORIES}"
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


def applies(fields: Mapping[str, Any], run_is_quantized: bool) -> bool:
    """Return whether Megatron applies a recipe in a run whose default is quantized or not."""
    if run_is_quantized:
        return bool(fields.get(_IN_QUANTIZED, True))
    return bool(fields.get(_IN_BF16, False))
