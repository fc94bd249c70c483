"""A Transformer Engine recipe for one linear, in the terms of Megatron's precision files.

Megatron has a recipe per module for training and, where it differs, one for evaluation. A recipe
names an FP8 or an FP4 quantization; without one the module runs BF16. With `custom` each GEMM has
one of `RECIPES`, through one of our quantizer factories (te/quantizers.py).

Sources: Megatron-Core's TEQuantizationRecipe (0.16 and later), Transformer Engine's recipes,
NVIDIA's compute capabilities (`GemmRecipe.gpus`).
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, model_validator

from megatron_snip.errors import UsageError
from megatron_snip.formats import FORMATS, Format, ScaleType
from megatron_snip.options import Option

FACTORIES = "megatron_snip.linears.te.quantizers"
"""Module of the quantizer factories of options that differ per GEMM."""


class RunPrecision(NamedTuple):
    """A low precision in Megatron's terms: that of its flags and of its precision files.

    Attributes:
        kind: `fp8` or `fp4`, the first part of the flags' names; empty for BF16.
        format: the value of `--fp8-format` or `--fp4-format`.
        recipe: the value of `--fp8-recipe` or `--fp4-recipe`.
    """

    kind: str = ""
    format: str = ""
    recipe: str = ""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the precision that a run has by default, from Megatron's TransformerConfig."""
        for kind in ("fp8", "fp4"):
            if number_format := getattr(config, kind, None):
                recipe = getattr(config, f"{kind}_recipe", "")
                return cls(kind, str(number_format), str(getattr(recipe, "value", recipe)))
        return cls()

    @property
    def flags(self) -> str:
        """Megatron's flags that make it the run's own precision; empty for BF16."""
        if not self.kind:
            return ""
        return f"--{self.kind}-format {self.format} --{self.kind}-recipe {self.recipe}"

    def fields(self) -> dict[str, str]:
        """Return the fields of Megatron's TEQuantizationRecipe that ask for it."""
        fields = {f"{self.kind}_quantization_recipe": self.recipe}
        return fields if self.kind == "fp4" else {**fields, "fp8_format": self.format}


BF16_RUN = RunPrecision()
"""No low precision."""


class Setting(NamedTuple):
    """An environment variable that changes what a recipe of Transformer Engine does.

    Attributes:
        variable: its name.
        values: the values that change the recipe; any other value leaves it as it is.
        effect: what they do, as messages show it.
        changes: the fields of the recipe's `Format` that they change; None if the statistics cannot
            be measured in this way.
    """

    variable: str
    values: tuple[str, ...]
    effect: str
    changes: Mapping[str, Any] | None = None

    def is_active(self, environment: Mapping[str, str]) -> bool:
        """Return whether the environment changes the recipe."""
        return environment.get(self.variable, "") in self.values


@dataclass(frozen=True)
class GemmRecipe:
    """One precision that Transformer Engine can run a GEMM in.

    Attributes:
        text: tiles and scales, as messages and tables show them.
        formats: formats of a plan that it stands for; the last one names what really runs.
        quantization: how it quantizes; the statistics quantize in the same way.
        run: Megatron's name of it.
        recipe_class: the class of Transformer Engine's recipe.
        gemms: what its GEMMs are called.
        gpus: compute capabilities with such tensor cores, `9.0` or `10.x`. A run whose own
            precision it is has it on any GPU.
        check: method of FP8GlobalStateManager that returns (available, reason).
        per_gemm: whether a linear can combine it with other recipes.
        has_history: whether its scales come from the magnitudes of earlier iterations, which
            Transformer Engine keeps for the run's own recipe only.
        converter: what torchtitan calls the format.
        dim_multiple: what both dimensions of a weight's shard and a dense linear's tokens must be
            multiples of: each is the contraction of one GEMM (16 bytes for tensor cores; MXFP8's
            tiles have 32).
        token_multiple: what an expert's tokens must be multiples of. Megatron pads to 128 for FP4,
            because the Hadamard transform and the scale layout work in complete groups.
        settings: the environment variables that change it.
    """

    text: str
    formats: tuple[str, ...]
    quantization: Format
    run: RunPrecision = BF16_RUN
    recipe_class: str = ""
    gemms: str = ""
    gpus: tuple[str, ...] = ()
    check: str = ""
    per_gemm: bool = True
    has_history: bool = False
    converter: str = ""
    dim_multiple: int = 1
    token_multiple: int = 1
    settings: tuple[Setting, ...] = ()

    def hybrid(self) -> "GemmRecipe":
        """Return it with E5M2 gradients, which `--fp8-format hybrid` asks for."""
        return replace(
            self,
            text=f"{self.text}, E5M2 gradients",
            formats=tuple(name if name == "fp8" else f"{name}_hybrid" for name in self.formats),
            quantization=self.quantization.hybrid(),
            run=self.run._replace(format="hybrid"),
        )


_BLOCKWISE = GemmRecipe(
    "1x128 tiles, 128x128 weight blocks, power-of-two scales",
    ("fp8", "fp8_blockwise"),
    FORMATS["fp8_blockwise"],
    RunPrecision("fp8", "e4m3", "blockwise"),
    "Float8BlockScaling",
    "FP8 GEMMs in blocks",
    ("9.0",),
    "is_fp8_block_scaling_available",
    converter="float8",
    dim_multiple=16,
    token_multiple=16,
    settings=(
        Setting(
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
            ("1",),
            "FP32 scales",
            {"scale": ScaleType.FP32},
        ),
    ),
)
_MXFP8 = GemmRecipe(
    "1x32 tiles, power-of-two scales",
    ("fp8", "mxfp8"),
    FORMATS["mxfp8"],
    RunPrecision("fp8", "e4m3", "mxfp8"),
    "MXFP8BlockScaling",
    "MXFP8 GEMMs",
    ("10.x",),
    "is_mxfp8_available",
    converter="mxfp8",
    dim_multiple=32,
    token_multiple=32,
)
_TENSORWISE = GemmRecipe(
    "current scaling, one scale per tensor",
    ("fp8", "fp8_tensorwise"),
    FORMATS["fp8_tensorwise"],
    RunPrecision("fp8", "e4m3", "tensorwise"),
    "Float8CurrentScaling",
    "FP8 GEMMs",
    ("8.9", "9.0", "10.x", "12.x"),
    "is_fp8_available",
    converter="float8",
    dim_multiple=16,
    token_multiple=16,
    settings=(Setting("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", ("1",), "power-of-two scales"),),
)
_DELAYED = replace(
    _TENSORWISE,
    text="delayed scaling, one scale per tensor from the history of its largest magnitudes",
    formats=("fp8",),
    quantization=replace(FORMATS["fp8_tensorwise"], name="fp8_delayed", scale=ScaleType.DELAYED),
    run=RunPrecision("fp8", "e4m3", "delayed"),
    recipe_class="DelayedScaling",
    gpus=(),
    per_gemm=False,
    has_history=True,
    settings=(),
)
_NVFP4 = GemmRecipe(
    "1x16 tiles, 16x16 weight blocks, random Hadamard transform in wgrad",
    ("fp4", "nvfp4_2d_rht", "nvfp4"),
    FORMATS["nvfp4_2d_rht"],
    RunPrecision("fp4", "e2m1", "nvfp4"),
    "NVFP4BlockScaling",
    "NVFP4 GEMMs",
    ("10.x", "12.x"),
    "is_nvfp4_available",
    converter="nvfp4",
    dim_multiple=32,
    token_multiple=128,
    settings=(
        Setting("NVTE_NVFP4_DISABLE_RHT", ("1",), "no rotation", {"wgrad_hadamard": 0}),
        Setting(
            "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
            ("1",),
            "1x16 weight tiles",
            {"weight_block": (1, 16)},
        ),
        Setting(
            "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
            ("1",),
            "gradients rounded to nearest",
            {"stochastic_grad": False},
        ),
        Setting("NVTE_NVFP4_ROW_SCALED_ACTIVATION", ("1",), "one FP32 scale per token"),
        Setting(
            "NVTE_NVFP4_4OVER6",
            ("weights", "activations", "all"),
            "blocks scaled to 4 or 6, whichever is closer",
        ),
    ),
)

RECIPES = {
    "bf16": GemmRecipe("as Megatron runs it", ("bf16",), FORMATS["bf16"]),
    "blockwise": _BLOCKWISE,
    "mxfp8": _MXFP8,
    "tensorwise_hybrid": _TENSORWISE.hybrid(),
    "tensorwise": _TENSORWISE,
    "delayed_hybrid": _DELAYED.hybrid(),
    "delayed": _DELAYED,
    "blockwise_hybrid": _BLOCKWISE.hybrid(),
    "mxfp8_hybrid": _MXFP8.hybrid(),
    "nvfp4": _NVFP4,
}
"""Transformer Engine's recipes by name, the best first: in a BF16 run a format means the first of
its recipes that the GPU has, in other runs the run's own if that is one of them."""


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

    @property
    def follows_the_run(self) -> bool:
        """Whether it is the run's own recipe, in the autocast that Megatron itself opens."""
        return self.is_uniform and RECIPES[self.fprop].has_history

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's TEQuantizationRecipe, as plain types.

        The recipe applies whatever precision the run has by default. For that both overrides must
        be set: without the second, a recipe in a BF16 run silently has no effect.
        """
        if self.follows_the_run:
            return {"override_quantized_autocast": False}
        in_quantized = {"override_quantized_autocast": True}
        if self == TERecipe():
            return in_quantized  # in a BF16 run there is nothing to override
        if self.is_uniform:
            fields = RECIPES[self.fprop].run.fields()
        else:
            fields = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": self.factory}
        return {**fields, **in_quantized, "override_nonquantized_autocast": True}


def storage_fields(recipe: TERecipe) -> dict[str, bool]:
    """Return the fields of TEQuantizationRecipe that store a weight as its GEMMs multiply it.

    A weight is stored in FP8 or FP4 where all three GEMMs run that, and in BF16 elsewhere.
    """
    kind = RECIPES[recipe.fprop].run.kind if recipe.is_uniform else ""
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
        if "custom" in (fp8, fp4):
            return _from_factory(self.custom_recipe_factory)
        asked = RunPrecision()
        if fp8 is not None:
            asked = RunPrecision("fp8", str(self.fp8_format), fp8)
        elif fp4 is not None:
            asked = RunPrecision("fp4", "e2m1", fp4)
        name = recipe_of(asked)
        if not name or RECIPES[name].has_history:
            precisions = (each.run for each in RECIPES.values() if not each.has_history)
            known = ", ".join(f"{run.recipe} ({run.format})" for run in precisions if run.kind)
            raise UsageError(
                f"recipe '{asked.recipe}' ({asked.format}) is no format of a plan; known: {known}"
            )
        return TERecipe(name, name, name)

    def applies(self, run_is_quantized: bool) -> bool:
        """Return whether Megatron applies it in a run whose default is quantized or not."""
        if run_is_quantized:
            return bool(self.override_quantized_autocast)
        return bool(self.override_nonquantized_autocast)


def recipe_of(run: RunPrecision) -> str:
    """Return the name in `RECIPES` of a precision of Megatron's; empty if it is none of them."""
    return next((name for name, recipe in RECIPES.items() if recipe.run == run), "")


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


def run_flags(recipes: Iterable[TERecipe]) -> str:
    """Return Megatron's flags for the low precision that a run of such recipes needs by default.

    Megatron has one default per run; modules without a recipe of their own run it. It decides what
    experts' tokens are padded to, so the recipe with the widest padding is named; but delayed
    scaling can only be the run's own. The text is empty if all recipes are BF16.
    """
    used = [RECIPES[name] for recipe in recipes for name in recipe]
    widest = max(
        used, key=lambda one: (one.has_history, one.token_multiple), default=RECIPES["bf16"]
    )
    return widest.run.flags
