"""A Transformer Engine recipe for one linear, in the words of Megatron's precision files.

Megatron keeps two recipes a module (training and, where it differs, evaluation); each names an FP8
or an FP4 quantization, or neither, which is BF16. What formats a recipe runs in:

    blockwise   fp8     E4M3, 1x128 tiles, 128x128 blocks of the weight
    mxfp8       mxfp8   E4M3, 1x32 tiles, power-of-two scales
    nvfp4       nvfp4   E2M1, 1x16 tiles, E4M3 scales under one FP32 scale
    bf16        bf16
    custom      one word a GEMM, through one of our quantizer factories (linears/te_factories.py)

Sources: Megatron-Core's TEQuantizationRecipe (0.16 and later), Transformer Engine's recipes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.options import Option

FORMAT_OF_WORD = {"bf16": "bf16", "blockwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""The number format that a recipe's word stands for."""

FACTORIES = "megatron_snip.linears.te_factories"
"""Where the quantizer factories of options that differ by GEMM live."""

_RUN_FLAGS = {
    "nvfp4": "--fp4-format e2m1",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
"""Word -> the flags that make it the run's own precision, from the widest padding down."""

_FP8 = "fp8_quantization_recipe"
_FP4 = "fp4_quantization_recipe"
_FACTORY = "custom_recipe_factory"
_IN_QUANTIZED = "override_quantized_autocast"
_IN_BF16 = "override_nonquantized_autocast"
_KNOWN = {_FP8, _FP4, _FACTORY, _IN_QUANTIZED, _IN_BF16, "fp8_format", "tp_only_amax_red"}
_STORED = {"fp8_param": "FP8", "fp4_param": "FP4"}
"""Fields of Megatron-Core 0.18 and later that store the weight itself in low precision."""


@dataclass(frozen=True)
class TERecipe:
    """What one linear's three GEMMs run in.

    Attributes:
        fprop: word of the forward GEMM: bf16, blockwise, mxfp8 or nvfp4.
        dgrad: word of the input gradient's GEMM.
        wgrad: word of the weight gradient's GEMM.
    """

    fprop: str = "bf16"
    dgrad: str = "bf16"
    wgrad: str = "bf16"

    @property
    def words(self) -> tuple[str, str, str]:
        """The words in the order fprop, dgrad, wgrad."""
        return (self.fprop, self.dgrad, self.wgrad)

    @property
    def is_uniform(self) -> bool:
        """Whether one of Transformer Engine's own recipes does; else it takes a factory."""
        return self.fprop == self.dgrad == self.wgrad

    def __str__(self) -> str:
        """Return the recipe as logs show it, e.g. `mxfp8` or `custom(nvfp4, mxfp8, bf16)`."""
        return self.fprop if self.is_uniform else f"custom({', '.join(self.words)})"

    @property
    def option(self) -> Option:
        """The option that names the formats which really run."""
        return Option(*(FORMAT_OF_WORD[word] for word in self.words))

    @property
    def factory(self) -> str:
        """Dotted path of the quantizer factory of a recipe that is not uniform."""
        return f"{FACTORIES}.{'_'.join(self.words)}"

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's TEQuantizationRecipe, as plain types.

        The recipe applies whatever precision the run has by default. For that both overrides must
        be set: without the second a recipe in a BF16 run is silently without effect.
        """
        if self == TERecipe():
            return {_IN_QUANTIZED: True}  # in a BF16 run there is nothing to override
        both: dict[str, Any] = {_IN_QUANTIZED: True, _IN_BF16: True}
        if not self.is_uniform:
            return {_FP8: "custom", _FACTORY: self.factory, **both}
        if self.fprop == "nvfp4":
            return {_FP4: "nvfp4", **both}
        return {_FP8: self.fprop, "fp8_format": "e4m3", **both}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], where: str) -> TERecipe:
        """Read what `fields` (or a user) wrote.

        Args:
            fields: of one recipe.
            where: how error messages call it.

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
            raise UsageError(f"{where}: an FP8 and an FP4 recipe at once; keep one")
        if "custom" in (fp8, fp4):
            return cls._from_factory(fields.get(_FACTORY), where)
        word = str(fp8 or fp4 or "bf16")
        if word not in FORMAT_OF_WORD:
            known = ", ".join(w for w in FORMAT_OF_WORD if w != "bf16")
            raise UsageError(f"{where}: recipe '{word}' is no format of a plan; known: {known}")
        if fp8 is not None and fields.get("fp8_format", "e4m3") != "e4m3":
            raise UsageError(
                f"{where}: fp8_format '{fields['fp8_format']}' has E5M2 gradients, which plans do "
                "not have; use e4m3"
            )
        return cls(word, word, word)

    @classmethod
    def _from_factory(cls, factory: Any, where: str) -> TERecipe:
        words = str(factory).removeprefix(f"{FACTORIES}.").split("_")
        if len(words) != 3 or not set(words) <= set(FORMAT_OF_WORD):
            raise UsageError(
                f"{where}: the factory '{factory}' is not one of {FACTORIES}; what it runs is "
                "unknown"
            )
        return cls(*words)


def run_flags(recipes: Iterable[TERecipe]) -> str:
    """Return the low precision of its own that a run of such recipes needs, as Megatron's flags.

    Megatron knows one a run. It decides what experts' tokens are padded to, so the recipe with the
    widest padding is named; modules without a recipe of their own run it. Empty for BF16 alone.
    """
    words = {word for recipe in recipes for word in recipe.words}
    return next((flags for word, flags in _RUN_FLAGS.items() if word in words), "")


def applies(fields: Mapping[str, Any], run_is_quantized: bool) -> bool:
    """Return whether Megatron heeds a recipe in a run whose own precision is quantized or not."""
    if run_is_quantized:
        return bool(fields.get(_IN_QUANTIZED, True))
    return bool(fields.get(_IN_BF16, False))
