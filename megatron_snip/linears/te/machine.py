"""What runs on this machine: its GPU, its Transformer Engine, and the recipe of each format.

`te/recipe.py` has the recipes; Transformer Engine's own checks of them (2.20) count as well.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_snip.config import Backend
from megatron_snip.formats import FORMATS, Format, get_format
from megatron_snip.linears.te.recipe import RECIPES, TERecipe
from megatron_snip.options import Option

_PER_GEMM = (
    ("transformer_engine.common.recipe", "CustomRecipe"),
    ("transformer_engine.pytorch.quantization", "QuantizerRole"),
    ("transformer_engine.pytorch.tensor.hybrid_tensor", "HybridQuantizer"),
    ("transformer_engine.pytorch.tensor.identity_tensor", "IdentityQuantizer"),
    ("transformer_engine.pytorch.custom_recipes.quantizer_factories", "nvfp4_factory"),
)
"""What our quantizer factories need of Transformer Engine."""


@dataclass(frozen=True)
class Machine:
    """What decides how Transformer Engine's linears run.

    Attributes:
        capability: (major, minor) of the GPU, or None without one.
        te_version: of Transformer Engine, or None where it cannot be imported.
        te_unavailable: recipes that Transformer Engine cannot run here -> its reason; `custom` is
            the one that gives every GEMM its own quantizers.
    """

    capability: tuple[int, int] | None = None
    te_version: str | None = None
    te_unavailable: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return e.g. `compute capability 9.0`."""
        if self.capability is None:
            return "no GPU"
        return "compute capability {}.{}".format(*self.capability)


def this_machine(with_te: bool) -> Machine:
    """Return the machine of this process.

    Args:
        with_te: query Transformer Engine as well. It is imported for that, which takes seconds
            and fails on a machine without its libraries.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if not with_te:
        return Machine(capability)
    try:
        te = importlib.import_module("transformer_engine")
        manager = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    except Exception:  # not installed, or a library of its own is missing
        return Machine(capability)
    return Machine(
        capability, str(te.__version__), {} if capability is None else _unavailable_recipes(manager)
    )


def _unavailable_recipes(manager: Any) -> dict[str, str]:
    """Return the recipes that the installed Transformer Engine cannot run here, and why."""
    found = {}
    missing = False, "this Transformer Engine does not have the recipe"
    for name, check in ((name, recipe.check) for name, recipe in RECIPES.items() if recipe.check):
        available, reason = getattr(manager, check)() if hasattr(manager, check) else missing
        if not available:
            found[name] = str(reason)
    try:
        for module, name in _PER_GEMM:
            getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        found["custom"] = "has no quantizers per GEMM (CustomRecipe with HybridQuantizer)"
    return found


def te_support(name: str, machine: Machine) -> tuple[str, str]:
    """Return how Transformer Engine runs a format on a machine.

    Returns:
        (recipe, text): the recipe's name and what it does, or an empty name and why there is none.

    Raises:
        UsageError: if the format is unknown.
    """
    if not get_format(name).quantized:
        return "bf16", RECIPES["bf16"].text
    by_name = {key: recipe for key, recipe in RECIPES.items() if name in recipe.formats}
    if not by_name:
        return "", f"Transformer Engine has no recipe for {name}"
    gpus = {major: key for key, recipe in by_name.items() for major in recipe.gpus}
    found = "" if machine.capability is None else gpus.get(machine.capability[0], "")
    if not found:
        labels = " or ".join(text for recipe in by_name.values() for text in recipe.gpus.values())
        first = next(iter(by_name.values()))
        return "", f"{first.gemms} need a GPU of compute capability {labels}"
    if machine.te_version is None:
        return "", "Transformer Engine cannot be imported"
    if found in machine.te_unavailable:
        return "", machine.te_unavailable[found]
    return found, f"{found} recipe: {RECIPES[found].text}"


def measured_format(name: str, backend: Backend, machine: Machine) -> Format:
    """Return how a format is quantized where it runs; statistics are measured with it.

    A format that Transformer Engine cannot run on this machine is measured as simulated.
    """
    recipe = te_support(name, machine)[0] if backend == "te" else ""
    if recipe == "blockwise" and os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES") == "1":
        return FORMATS["fp8"]
    return RECIPES[recipe].quantization if recipe else get_format(name)


def te_refusal(option: Option, machine: Machine) -> str | None:
    """Return why Transformer Engine cannot run an option on a machine, or None if it can."""
    for name in option.formats:
        recipe, text = te_support(name, machine)
        if not recipe:
            return f"{name} on {machine}: {text}"
    if "custom" in machine.te_unavailable and not te_recipe(option, machine).is_uniform:
        reason = machine.te_unavailable["custom"]
        return f"{option}: Transformer Engine {machine.te_version} {reason}"
    return None


def te_recipe(option: Option, machine: Machine) -> TERecipe:
    """Return the recipe that runs an option under Transformer Engine; `te_refusal` must be None."""
    recipe = TERecipe(*(te_support(name, machine)[0] for name in option.formats))
    assert all(recipe), f"{option} on {machine}"
    return recipe
