"""What runs on this machine: its GPU, its Transformer Engine, and the recipe of each format.

`te/recipe_table.py` has the recipes; Transformer Engine's own checks of them (2.20) count as well.
In a run that is FP8 or FP4 by default, `fp8` or `fp4` is the recipe that the run has set.
"""

import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_snip.config import Backend
from megatron_snip.formats import Format, get_format
from megatron_snip.linears.te.recipe import TERecipe
from megatron_snip.linears.te.recipe_table import (
    BF16_JOB,
    RECIPES,
    JobPrecision,
    RecipeVariable,
    recipe_of,
)
from megatron_snip.log import log_failure
from megatron_snip.options import Option

logger = logging.getLogger(__name__)

OVERRIDE = "NVTE_BACKWARD_OVERRIDE"
"""Variable that Transformer Engine reads when it is imported."""

RECIPES_PER_GEMM = "custom"
"""Key of `Machine.te_unavailable`: recipes that give every GEMM its own quantizers."""

RECIPES_PER_GEMM_IN_EXPERTS = "custom experts"
"""Key of `Machine.te_unavailable`: the same in grouped linears."""

_PER_GEMM = (
    ("transformer_engine.common.recipe", "CustomRecipe"),
    ("transformer_engine.pytorch.quantization", "QuantizerRole"),
    ("transformer_engine.pytorch.quantization", "RecipeState"),
    ("transformer_engine.pytorch.tensor.hybrid_tensor", "HybridQuantizer"),
    ("transformer_engine.pytorch.tensor.identity_tensor", "IdentityQuantizer"),
)
"""What our quantizer factories need of Transformer Engine."""


@dataclass(frozen=True)
class Machine:
    """What decides how Transformer Engine's linears run.

    Attributes:
        capability: (major, minor) of the GPU, or None without one.
        te_version: version of Transformer Engine, or None where it cannot be imported.
        te_unavailable: recipes that Transformer Engine cannot run here -> its reason. A key is a
            name in `RECIPES`, RECIPES_PER_GEMM or RECIPES_PER_GEMM_IN_EXPERTS.
        job: the low precision that the job has by default.
        backward_override: what Transformer Engine runs dgrad and wgrad of every quantized linear
            in: `high_precision` (BF16), `dequantized` (BF16, of W and X as fprop rounded them), or
            empty: as in the recipe.
    """

    capability: tuple[int, int] | None = None
    te_version: str | None = None
    te_unavailable: Mapping[str, str] = field(default_factory=dict)
    job: JobPrecision = BF16_JOB
    backward_override: str = ""

    @property
    def job_recipe(self) -> str:
        """Name in `RECIPES` of the job's own recipe; empty in a BF16 run or for a custom recipe."""
        return recipe_of(self.job) if self.job.kind else ""

    def runs_on(self, gpus: tuple[str, ...]) -> bool:
        """Return whether the GPU is one of those that a recipe lists."""
        if self.capability is None:
            return False
        major, minor = self.capability
        return f"{major}.{minor}" in gpus or f"{major}.x" in gpus

    def __str__(self) -> str:
        """Return e.g. `compute capability 9.0`."""
        if self.capability is None:
            return "no GPU"
        return "compute capability {}.{}".format(*self.capability)


def this_machine(with_te: bool, config: Any = None) -> Machine:
    """Return the machine of this process.

    Args:
        with_te: query Transformer Engine as well. It is imported for that, which takes seconds
            and fails on a machine without its libraries.
        config: Megatron's TransformerConfig of the run, for the job's own precision.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    job = JobPrecision.of(config)
    if not with_te:
        return Machine(capability, job=job)
    try:
        te = importlib.import_module("transformer_engine")
        manager = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    except Exception as error:  # not installed, or its import fails in a way of its own
        if getattr(error, "name", None) != "transformer_engine":
            log_failure(logger, "importing Transformer Engine", error)
        return Machine(capability, job=job)
    unavailable = {} if capability is None else _unavailable_recipes(manager)
    recipes = importlib.import_module("transformer_engine.common.recipe")
    # What NVTE_BACKWARD_OVERRIDE was when Transformer Engine was imported. Releases without the
    # variable have no such default of a recipe.
    override = getattr(recipes.Float8CurrentScaling, "backward_override", None)
    return Machine(capability, str(te.__version__), unavailable, job, str(override or ""))


def _unavailable_recipes(manager: Any) -> dict[str, str]:
    """Return the recipes that the installed Transformer Engine cannot run here, and why."""
    found = {}
    for name, recipe in RECIPES.items():
        if not recipe.check:
            continue
        if not hasattr(manager, recipe.check):
            found[name] = "this Transformer Engine does not have the recipe"
            continue
        is_available, reason = getattr(manager, recipe.check)()
        if not is_available:
            found[name] = str(reason)
    try:
        for module, name in _PER_GEMM:
            getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        found[RECIPES_PER_GEMM] = "has no quantizers per GEMM (CustomRecipe with HybridQuantizer)"
    grouped = importlib.import_module("transformer_engine.pytorch.module.grouped_linear")
    if not hasattr(grouped, "HybridQuantizer"):  # before 2.19
        reason = "takes one format for all three GEMMs of grouped experts"
        found[RECIPES_PER_GEMM_IN_EXPERTS] = reason
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
    recipes = {key: recipe for key, recipe in RECIPES.items() if name in recipe.formats}
    if not recipes:
        return "", f"Transformer Engine has no recipe for {name}"
    # The job's own recipe runs whatever `gpus` lists: the user has chosen it.
    is_own = machine.capability is not None and machine.job_recipe in recipes
    if is_own:
        found = machine.job_recipe
    else:
        runnable = [key for key, recipe in recipes.items() if machine.runs_on(recipe.gpus)]
        found = runnable[0] if runnable else ""  # the best comes first
    if not found:
        widest = max(recipes.values(), key=lambda recipe: len(recipe.gpus))
        gpus = " or ".join(widest.gpus)  # those of the format's other recipes are among them
        return "", f"{widest.gemms} need a GPU of compute capability {gpus}"
    if machine.te_version is None:
        return "", "Transformer Engine cannot be imported"
    if found in machine.te_unavailable:
        return "", machine.te_unavailable[found]
    conflicts = _conflicts(found, machine)
    if conflicts:
        return "", conflicts[0]
    effects = "".join(f", {setting.effect} ({setting.variable})" for setting in _active(found))
    if machine.backward_override:
        effects += f", dgrad and wgrad in BF16 ({OVERRIDE})"
    whose = "the job's own " if is_own else ""
    return found, f"{whose}{found} recipe: {RECIPES[found].text}{effects}"


def _active(recipe: str) -> list[RecipeVariable]:
    """Return the environment's settings that change a recipe."""
    return [setting for setting in RECIPES[recipe].variables if setting.is_active(os.environ)]


def _conflicts(recipe: str, machine: Machine) -> list[str]:
    """Return why Transformer Engine cannot run a recipe as the environment sets it."""
    if machine.backward_override and RECIPES[recipe].has_history:
        return [f"delayed scaling runs only without {OVERRIDE}; unset it"]
    conflicts = (setting.conflict(os.environ) for setting in _active(recipe))
    return [text for text in conflicts if text is not None]


def conflicting_variables(machine: Machine) -> list[str]:
    """Return a line for each recipe of the GPU that the environment's settings exclude."""
    return [
        f"{recipe} cannot run: {text}"
        for recipe in RECIPES
        if machine.runs_on(RECIPES[recipe].gpus) or recipe == machine.job_recipe
        for text in _conflicts(recipe, machine)
    ]


def measured_format(name: str, backend: Backend, machine: Machine) -> Format:
    """Return how a format is quantized where it runs; statistics are measured with it.

    A format that Transformer Engine cannot run on this machine is measured as simulated.
    """
    recipe = te_support(name, machine)[0] if backend == "te" else ""
    if not recipe:
        return get_format(name)
    found = RECIPES[recipe].quantization
    for setting in _active(recipe):
        found = replace(found, **(setting.changes or {}))
    return found


def unmeasured_variables(names: Iterable[str], machine: Machine) -> list[str]:
    """Return a line for each setting of the environment that statistics cannot reproduce."""
    recipes = dict.fromkeys(te_support(name, machine)[0] for name in names)
    lines = []
    for recipe in filter(None, recipes):
        for setting in _active(recipe):
            if setting.changes is None:
                value = os.environ[setting.variable]
                lines.append(
                    f"{setting.variable}={value} ({setting.effect}) is not measured: the "
                    f"statistics of {recipe} are those without it"
                )
    if machine.backward_override == "dequantized":
        lines.append(
            f"{OVERRIDE}=dequantized is not measured: dgrad and wgrad multiply W and X as fprop "
            "rounded them, and the statistics are those of exact W and X"
        )
    return lines


def forward_only(option: Option) -> Option:
    """Return an option with dgrad and wgrad in BF16."""
    return Option(option.fprop, "bf16", "bf16")


def te_recipe(option: Option, machine: Machine) -> TERecipe:
    """Return the recipe that runs an option under Transformer Engine; `te_refusal` must be None."""
    if machine.backward_override:
        option = Option.uniform(option.fprop)  # dgrad and wgrad are BF16 in any case
    recipe = TERecipe(*(te_support(name, machine)[0] for name in option.formats))
    assert all(recipe), f"{option} on {machine}"
    return recipe
