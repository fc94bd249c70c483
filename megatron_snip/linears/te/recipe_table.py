"""Transformer Engine's recipes: what each does, where it runs, and what it is called elsewhere.

`RECIPES` is the only list of them. A recipe is one precision of one GEMM; `recipe.py` combines
three of them for a linear.

Sources: Transformer Engine's recipes, NVIDIA's compute capabilities (`GemmRecipe.gpus`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from megatron_snip.formats import DELAYED, FORMATS, Format, ScaleType


class JobPrecision(NamedTuple):
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
        """Megatron's flags that make it the job's own precision; empty for BF16."""
        if not self.kind:
            return ""
        return f"--{self.kind}-format {self.format} --{self.kind}-recipe {self.recipe}"

    def fields(self) -> dict[str, str]:
        """Return the fields of Megatron's TEQuantizationRecipe that ask for it."""
        fields = {f"{self.kind}_quantization_recipe": self.recipe}
        return fields if self.kind == "fp4" else {**fields, "fp8_format": self.format}


BF16_JOB = JobPrecision()
"""No low precision."""


class RecipeVariable(NamedTuple):
    """An environment variable that changes what a recipe of Transformer Engine does.

    Attributes:
        variable: name of the variable.
        values: the values that change the recipe; any other value leaves it as it is.
        effect: what they do, as messages show it.
        changes: the fields of the recipe's `Format` that they change; None if the statistics cannot
            be measured in this way.
        needs: variables that must be 1 as well; without them Transformer Engine raises an error in
            the first forward.
        is_gathered: whether a linear can run it that gathers its input (sequence parallelism).
    """

    variable: str
    values: tuple[str, ...]
    effect: str
    changes: Mapping[str, Any] | None = None
    needs: tuple[str, ...] = ()
    is_gathered: bool = True

    def is_active(self, environment: Mapping[str, str]) -> bool:
        """Return whether the environment changes the recipe."""
        return environment.get(self.variable, "") in self.values

    def conflict(self, environment: Mapping[str, str]) -> str | None:
        """Return why Transformer Engine cannot run an active setting, or None if it can."""
        missing = [f"{name}=1" for name in self.needs if environment.get(name) != "1"]
        if not missing:
            return None
        value = environment[self.variable]
        return f"{self.variable}={value} ({self.effect}) runs only with {' and '.join(missing)}"


@dataclass(frozen=True)
class GemmRecipe:
    """One precision that Transformer Engine can run a GEMM in.

    Attributes:
        text: tiles and scales, as messages and tables show them.
        formats: names of formats in plans that it runs, the general one (fp8) first, and the one
            that names this recipe alone last.
        quantization: how it quantizes; the statistics quantize in the same way.
        precision: Megatron's name of it.
        recipe_class: the class of Transformer Engine's recipe.
        gemms: what its GEMMs are called.
        gpus: compute capabilities on which a plan may choose it, `9.0` or `10.x`. In a run that
            has this recipe by its own flags, a plan may choose it on any GPU.
        check: method of FP8GlobalStateManager that returns (available, reason).
        per_gemm: whether a linear can combine it with other recipes.
        has_history: whether its scales come from the magnitudes of earlier iterations, which
            Transformer Engine keeps for the job's own recipe only.
        dequantizes_columns: whether Transformer Engine can dequantize a tensor of which it has the
            columns alone. It gathers an input in that way if wgrad has a recipe of its own.
        has_overlap_buffer: whether Transformer Engine's FP8 buffers for `--tp-comm-overlap` hold
            its operands.
        converter: what torchtitan calls the format.
        modelopt: ModelOpt's parameters of a layer in that format.
        dim_multiple: both dimensions of a weight's shard, and the tokens of a dense linear, must be
            multiples of this. The reason: each of the three is the contraction of one GEMM.
            Tensor cores need 16 bytes; MXFP8's tiles have 32 elements.
        token_multiple: what an expert's tokens must be multiples of. Megatron pads to 128 for FP4,
            because the Hadamard transform and the scale layout work in complete groups.
        small_shapes: (N, K) pairs. Where both dimensions of a weight's shard are at most those of a
            pair, the recipe may be slower than BF16 (`availability.small_linears`).
        variables: the environment variables that change it.
    """

    text: str
    formats: tuple[str, ...]
    quantization: Format
    precision: JobPrecision = BF16_JOB
    recipe_class: str = ""
    gemms: str = ""
    gpus: tuple[str, ...] = ()
    check: str = ""
    per_gemm: bool = True
    has_history: bool = False
    dequantizes_columns: bool = True
    has_overlap_buffer: bool = False
    converter: str = ""
    modelopt: Mapping[str, Any] | None = None
    dim_multiple: int = 1
    token_multiple: int = 1
    small_shapes: tuple[tuple[float, float], ...] = ()
    variables: tuple[RecipeVariable, ...] = ()

    @property
    def general_format(self) -> str:
        """What an option calls it where the job itself runs it: fp8, and not mxfp8."""
        return self.formats[0]

    @property
    def exact_format(self) -> str:
        """The format's name that no other recipe has."""
        return self.formats[-1]

    def hybrid(self) -> "GemmRecipe":
        """Return it with E5M2 gradients, which `--fp8-format hybrid` asks for."""
        return replace(
            self,
            text=f"{self.text}, E5M2 gradients",
            formats=tuple(name if name == "fp8" else f"{name}_hybrid" for name in self.formats),
            quantization=self.quantization.hybrid(),
            precision=self.precision._replace(format="hybrid"),
        )


_SMALL_BY_ROWS = ((2048, math.inf), (math.inf, 1024), (4096, 2048))
"""`small_shapes` of recipes with several scales in a tensor."""

_BLOCKWISE = GemmRecipe(
    text="1x128 tiles, 128x128 weight blocks, power-of-two scales",
    formats=("fp8", "fp8_blockwise"),
    quantization=FORMATS["fp8_blockwise"],
    precision=JobPrecision("fp8", "e4m3", "blockwise"),
    recipe_class="Float8BlockScaling",
    gemms="FP8 GEMMs in blocks",
    gpus=("9.0",),
    check="is_fp8_block_scaling_available",
    converter="float8",
    modelopt={"quant_algo": "FP8"},
    dim_multiple=16,
    token_multiple=16,
    small_shapes=_SMALL_BY_ROWS,
    variables=(
        RecipeVariable(
            variable="NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
            values=("1",),
            effect="FP32 scales",
            changes={"scale": ScaleType.FP32},
        ),
    ),
)
_MXFP8 = GemmRecipe(
    text="1x32 tiles, power-of-two scales",
    formats=("fp8", "mxfp8"),
    quantization=FORMATS["mxfp8"],
    precision=JobPrecision("fp8", "e4m3", "mxfp8"),
    recipe_class="MXFP8BlockScaling",
    gemms="MXFP8 GEMMs",
    gpus=("10.x",),
    check="is_mxfp8_available",
    has_overlap_buffer=True,
    converter="mxfp8",
    modelopt={"quant_algo": "MXFP8", "group_size": 32},
    dim_multiple=32,
    token_multiple=32,
    small_shapes=_SMALL_BY_ROWS,
)
_TENSORWISE = GemmRecipe(
    text="current scaling, one scale per tensor",
    formats=("fp8", "fp8_tensorwise"),
    quantization=FORMATS["fp8_tensorwise"],
    precision=JobPrecision("fp8", "e4m3", "tensorwise"),
    recipe_class="Float8CurrentScaling",
    gemms="FP8 GEMMs",
    gpus=("8.9", "9.0", "10.x", "12.x"),
    check="is_fp8_available",
    has_overlap_buffer=True,
    converter="float8",
    modelopt={"quant_algo": "FP8"},
    dim_multiple=16,
    token_multiple=16,
    small_shapes=((1024, 4096),),
    variables=(
        RecipeVariable(
            variable="NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
            values=("1",),
            effect="power-of-two scales",
        ),
    ),
)
_DELAYED = replace(
    _TENSORWISE,
    text="delayed scaling, one scale per tensor from the history of its largest magnitudes",
    formats=("fp8",),
    quantization=DELAYED,
    precision=JobPrecision("fp8", "e4m3", "delayed"),
    recipe_class="DelayedScaling",
    gpus=(),
    per_gemm=False,
    has_history=True,
    variables=(),
)
_NVFP4 = GemmRecipe(
    text="1x16 tiles, 16x16 weight blocks, random Hadamard transform in wgrad",
    # `nvfp4` is NVIDIA's name of the format. Transformer Engine trains in it with square weight
    # blocks and a rotation, which our simulation calls nvfp4_2d_rht; so that is what is measured.
    formats=("fp4", "nvfp4_2d_rht", "nvfp4"),
    quantization=FORMATS["nvfp4_2d_rht"],
    precision=JobPrecision("fp4", "e2m1", "nvfp4"),
    recipe_class="NVFP4BlockScaling",
    gemms="NVFP4 GEMMs",
    gpus=("10.x", "12.x"),
    check="is_nvfp4_available",
    dequantizes_columns=False,
    converter="nvfp4",
    modelopt={"quant_algo": "NVFP4", "group_size": 16},
    dim_multiple=32,
    token_multiple=128,
    small_shapes=_SMALL_BY_ROWS,
    variables=(
        RecipeVariable(
            variable="NVTE_NVFP4_DISABLE_RHT",
            values=("1",),
            effect="no rotation",
            changes={"wgrad_hadamard": 0},
        ),
        RecipeVariable(
            variable="NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
            values=("1",),
            effect="1x16 weight tiles",
            changes={"weight_block": (1, 16)},
        ),
        RecipeVariable(
            variable="NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
            values=("1",),
            effect="gradients rounded to nearest",
            changes={"stochastic_grad": False},
        ),
        RecipeVariable(
            variable="NVTE_NVFP4_ROW_SCALED_ACTIVATION",
            values=("1",),
            effect="one FP32 scale per token",
            needs=("NVTE_NVFP4_DISABLE_RHT",),
            is_gathered=False,
        ),
        RecipeVariable(
            variable="NVTE_NVFP4_4OVER6",
            values=("weights",),
            effect="blocks of W scaled to 4 or 6, whichever is closer",
        ),
        RecipeVariable(
            variable="NVTE_NVFP4_4OVER6",
            values=("activations", "all"),
            effect="blocks scaled to 4 or 6, whichever is closer",
            needs=("NVTE_NVFP4_DISABLE_RHT",),
        ),
    ),
)

RECIPES = {
    "bf16": GemmRecipe(text="as Megatron runs it", formats=("bf16",), quantization=FORMATS["bf16"]),
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
"""Transformer Engine's recipes by name. The order matters, best first: in a BF16 run a format means
the first of its recipes that the GPU has. In an FP8 or FP4 run it means the job's own recipe, if
that is one of the format's."""


def recipe_of(precision: JobPrecision) -> str:
    """Return the name in `RECIPES` of a precision of Megatron's; empty if it is none of them."""
    return next((name for name, recipe in RECIPES.items() if recipe.precision == precision), "")
