"""A Transformer Engine recipe for one linear, in the terms of Megatron's precision files.

Megatron has a recipe per module for training and, where it differs, one for evaluation. A recipe
names an FP8 or an FP4 quantization; without one the module runs BF16. With `custom` each GEMM has
one of `RECIPES`, through one of our quantizer factories (te/quantizers.py).

Sources: Megatron-Core's TEQuantizationRecipe (0.16 and later), Transformer Engine's recipes,
NVIDIA's compute capabilities (`GemmRecipe.gpus`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, model_validator

from megatron_snip.errors import UsageError
from megatron_snip.formats import FORMATS, Format, ScaleType
from megatron_snip.options import Option

FACTORIES = "megatron_snip.linears.te.quantizers"
"""Module of the quantizer factories of options that differ per GEMM."""

_EARLIER_FACTORIES = "megatron_snip.linears.te_factories"


@dataclass(frozen=True)
class GemmRecipe:
    """One precision that Transformer Engine can run a GEMM in.

    Attributes:
        text: tiles and scales, as messages and tables show them.
        formats: formats of a plan that it stands for; the last one names what really runs.
        quantization: how it quantizes; the statistics quantize in the same way.
        factory: Transformer Engine's quantizer factory.
        gemms: what its GEMMs are called.
        gpus: major compute capability of GPUs with such tensor cores -> its name in tables.
        check: method of FP8GlobalStateManager that returns (available, reason).
        run_flags: Megatron's flags that make it the run's own precision.
        dim_multiple: what both dimensions of a weight's shard and a dense linear's tokens must be
            multiples of: each is the contraction of one GEMM (16 bytes for tensor cores; MXFP8's
            tiles have 32).
        token_multiple: what an expert's tokens must be multiples of. Megatron pads to 128 for FP4,
            because the Hadamard transform and the scale layout work in complete groups.
    """

    text: str
    formats: tuple[str, ...]
    quantization: Format
    factory: str
    gemms: str = ""
    gpus: Mapping[int, str] = field(default_factory=dict)
    check: str = ""
    run_flags: str = ""
    dim_multiple: int = 1
    token_multiple: int = 1


RECIPES = {
    "bf16": GemmRecipe("as Megatron runs it", ("bf16",), FORMATS["bf16"], "high_precision_factory"),
    "blockwise": GemmRecipe(
        "1x128 tiles, 128x128 weight blocks, power-of-two scales",
        ("fp8",),
        replace(FORMATS["fp8"], scale=ScaleType.E8M0),
        "float8_block_scaling_factory",
        "FP8 GEMMs in blocks",
        {9: "9.0"},
        "is_fp8_block_scaling_available",
        "--fp8-format e4m3 --fp8-recipe blockwise",
        dim_multiple=16,
        token_multiple=16,
    ),
    "mxfp8": GemmRecipe(
        "1x32 tiles, power-of-two scales",
        ("fp8", "mxfp8"),
        FORMATS["mxfp8"],
        "mxfp8_factory",
        "MXFP8 GEMMs",
        {10: "10.x"},
        "is_mxfp8_available",
        "--fp8-format e4m3 --fp8-recipe mxfp8",
        dim_multiple=32,
        token_multiple=32,
    ),
    "nvfp4": GemmRecipe(
        "1x16 tiles, 16x16 weight blocks, random Hadamard transform in wgrad",
        ("fp4", "nvfp4"),
        replace(FORMATS["nvfp4"], weight_block=(16, 16), wgrad_hadamard=16),
        "nvfp4_factory",
        "NVFP4 GEMMs",
        {10: "10.x", 12: "12.x"},
        "is_nvfp4_available",
        "--fp4-format e2m1",
        dim_multiple=32,
        token_multiple=128,
    ),
}
"""Transformer Engine's recipes by name; FP8 is always E4M3, and FP4 always E2M1."""


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
        return Option(*(RECIPES[name].formats[-1] for name in self))

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
        if not self.is_uniform:
            fields = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": self.factory}
        elif self.fprop == "nvfp4":
            fields = {"fp4_quantization_recipe": "nvfp4"}
        else:
            fields = {"fp8_quantization_recipe": self.fprop, "fp8_format": "e4m3"}
        return {**fields, **in_quantized, "override_nonquantized_autocast": True}


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
        if name not in RECIPES:
            known = ", ".join(other for other in RECIPES if other != "bf16")
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
    """Return the recipe of our quantizer factory `name`, e.g. `nvfp4_mxfp8_bf16`, or None."""
    recipes = name.split("_")
    return TERecipe(*recipes) if len(recipes) == 3 and set(recipes) <= set(RECIPES) else None


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

    Megatron has one default per run; modules without a recipe of their own run it. It decides what
    experts' tokens are padded to, so the recipe with the widest padding is named. The text is empty
    if all recipes are BF16.
    """
    used = [RECIPES[name] for recipe in recipes for name in recipe]
    return max(used, key=lambda one: one.token_multiple, default=RECIPES["bf16"]).run_flags
