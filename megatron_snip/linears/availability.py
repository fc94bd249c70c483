"""What can run here: options per linear, by backend, GPU, Transformer Engine and shapes.

    simulate   Megatron's own linears: operands quantized exactly as measured, multiplied in FP32
    te         Transformer Engine's linears under its own recipes, on tensor cores

docs/backends.md has the table. Callers log the texts that are returned.

Sources: NVIDIA's compute capabilities (FP8 tensor cores from 8.9, block-scaled ones from 10.0);
Transformer Engine 2.20's checks of recipes (`is_mxfp8_available` and the like).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from megatron_snip.collectives import any_rank, gather_json
from megatron_snip.config import AUTO, SIMULATED_FORMATS, SnipConfig
from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import FORMATS, Format, ScaleType, get_format
from megatron_snip.linears.te.modules import te_kind
from megatron_snip.linears.te.recipe import TERecipe
from megatron_snip.options import Option
from megatron_snip.planning.planner import Refusals, reasons

if TYPE_CHECKING:
    from megatron_snip.linears.model import AnyLinear, PlannedModel

logger = logging.getLogger(__name__)

_TE_CHECKS = {
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
"""Recipe -> the method of FP8GlobalStateManager that returns (available, reason)."""

_PER_GEMM = (
    ("transformer_engine.common.recipe", "CustomRecipe"),
    ("transformer_engine.pytorch.quantization", "QuantizerRole"),
    ("transformer_engine.pytorch.tensor.hybrid_tensor", "HybridQuantizer"),
    ("transformer_engine.pytorch.tensor.identity_tensor", "IdentityQuantizer"),
    ("transformer_engine.pytorch.custom_recipes.quantizer_factories", "nvfp4_factory"),
)
"""What our quantizer factories need of Transformer Engine."""

_TE_RECIPES: dict[tuple[str, int | None], str] = {
    ("fp8", 9): "blockwise",
    ("fp8", 10): "mxfp8",
    ("mxfp8", 10): "mxfp8",
    **{(name, major): "nvfp4" for name in ("fp4", "nvfp4") for major in (10, 12)},
}
"""(format, major compute capability) -> the Transformer Engine recipe that runs it."""

_TE_NEEDS = {
    "fp8": "FP8 GEMMs in blocks need a GPU of compute capability 9.0 or 10.x",
    "mxfp8": "MXFP8 GEMMs need a GPU of compute capability 10.x",
    "fp4": "NVFP4 GEMMs need a GPU of compute capability 10.0 or later",
    "nvfp4": "NVFP4 GEMMs need a GPU of compute capability 10.0 or later",
}
"""Format -> why a GPU without a row in `_TE_RECIPES` cannot run it."""

RECIPE_FORMATS: dict[str, Format] = {
    "bf16": FORMATS["bf16"],
    "blockwise": replace(FORMATS["fp8"], scale=ScaleType.E8M0),
    "mxfp8": FORMATS["mxfp8"],
    "nvfp4": replace(FORMATS["nvfp4"], weight_block=(16, 16), wgrad_hadamard=16),
}
"""Transformer Engine's recipe -> how it quantizes; this is what is measured for it."""

_RECIPE_TEXTS = {
    "blockwise": "1x128 tiles, 128x128 weight blocks, power-of-two scales",
    "mxfp8": "1x32 tiles, power-of-two scales",
    "nvfp4": "1x16 tiles, 16x16 weight blocks, random Hadamard transform in wgrad",
}

_FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Transformer Engine's variable that gives the blockwise recipe FP32 scales."""


class Backend(StrEnum):
    """What runs a linear's GEMMs."""

    SIMULATE = "simulate"
    TE = "te"


class ExecutionMode(StrEnum):
    """How a GEMM runs."""

    NATIVE = "native"
    """On tensor cores."""
    SIMULATED = "simulated"
    """Operands are quantized exactly and multiplied in FP32, without speed-up."""
    REFUSED = "refused"


@dataclass(frozen=True)
class SupportEntry:
    """How GEMMs of a format run on a machine.

    Attributes:
        mode: natively, simulated or not at all.
        reason: what the mode means on this machine, one phrase.
        recipe: the Transformer Engine recipe that runs it; empty for others.
    """

    mode: ExecutionMode
    reason: str
    recipe: str = ""


@dataclass(frozen=True)
class Machine:
    """What decides how Transformer Engine's linears run.

    Attributes:
        capability: (major, minor) of the GPU, or None without one.
        te_version: of Transformer Engine, or None where it cannot be imported.
        te_per_gemm: whether its CustomRecipe lets every GEMM have its own recipe.
        te_unavailable: recipes that Transformer Engine itself refuses here -> its reason.
    """

    capability: tuple[int, int] | None = None
    te_version: str | None = None
    te_per_gemm: bool = False
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
    unavailable = {} if capability is None else _te_unavailable(manager)
    return Machine(capability, str(te.__version__), has_per_gemm(), unavailable)


def has_per_gemm() -> bool:
    """Return whether the installed Transformer Engine lets every GEMM have its own quantizers."""
    for module, name in _PER_GEMM:
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            return False
    return True


def _te_unavailable(manager: Any) -> dict[str, str]:
    found = {}
    for recipe, method in _TE_CHECKS.items():
        if not hasattr(manager, method):
            found[recipe] = "this Transformer Engine does not have the recipe"
            continue
        available, reason = getattr(manager, method)()
        if not available:
            found[recipe] = str(reason)
    return found


def support(backend: Backend, fmt: str, machine: Machine) -> SupportEntry:
    """Return how GEMMs of a format run on a machine.

    Raises:
        UsageError: if the format is unknown.
    """
    if not get_format(fmt).quantized:
        return SupportEntry(ExecutionMode.NATIVE, "as Megatron runs it", "bf16")
    if backend is Backend.SIMULATE:
        reason = "operands exactly as measured, multiplied in FP32"
        return SupportEntry(ExecutionMode.SIMULATED, reason)
    refused = partial(SupportEntry, ExecutionMode.REFUSED)
    major = None if machine.capability is None else machine.capability[0]
    if fmt not in _TE_NEEDS:
        return refused(f"Transformer Engine has no recipe for {fmt}")
    if (fmt, major) not in _TE_RECIPES:
        return refused(_TE_NEEDS[fmt])
    recipe = _TE_RECIPES[fmt, major]
    if machine.te_version is None:
        return refused("Transformer Engine cannot be imported")
    if recipe in machine.te_unavailable:
        return refused(machine.te_unavailable[recipe])
    return SupportEntry(ExecutionMode.NATIVE, f"{recipe} recipe: {_RECIPE_TEXTS[recipe]}", recipe)


def measured_format(name: str, backend: Backend, machine: Machine) -> Format:
    """Return how a format is quantized where it runs; statistics are measured with it.

    A format that Transformer Engine cannot run on this machine is measured as simulated.
    """
    recipe = support(backend, name, machine).recipe
    if recipe == "blockwise" and os.environ.get(_FP32_SCALES) == "1":
        return FORMATS["fp8"]
    return RECIPE_FORMATS.get(recipe, get_format(name))


def auto_formats(backend: Backend, machine: Machine) -> tuple[str, ...]:
    """Return what `--snip-formats auto` means.

    Raises:
        UnsupportedError: if Transformer Engine can run BF16 only on this machine.
    """
    if backend is Backend.SIMULATE:
        return SIMULATED_FORMATS
    formats = [n for n in SIMULATED_FORMATS if te_refusal(Option.uniform(n), machine) is None]
    if not formats:
        reasons = "; ".join(support(backend, name, machine).reason for name in SIMULATED_FORMATS)
        raise UnsupportedError(
            f"--snip-formats auto: Transformer Engine runs only bf16 on {machine} ({reasons}); "
            "use --transformer-impl local to simulate fp8,fp4"
        )
    return ("bf16", *formats)


def resolve_formats(
    config: SnipConfig, model: Sequence[torch.nn.Module], control: ProcessGroup | None
) -> SnipConfig:
    """All ranks: return the settings with the formats that `auto` means for a model; log them.

    Raises:
        UnsupportedError: on every rank, see `auto_formats`.
    """
    if config.formats != (AUTO,):
        return config
    with_te = any(te_kind(module) is not None for chunk in model for module in chunk.modules())
    with_te = any_rank(with_te, control)
    backend = Backend.TE if with_te else Backend.SIMULATE
    formats = auto_formats(backend, this_machine(with_te))
    if control is None or torch.distributed.get_rank() == 0:
        logger.info("snip: formats auto: %s (backend %s)", ",".join(formats), backend)
    return config.model_copy(update={"formats": formats})


def te_refusal(option: Option, machine: Machine) -> str | None:
    """Return why Transformer Engine cannot run an option on a machine, or None if it can."""
    for name in option.formats:
        entry = support(Backend.TE, name, machine)
        if entry.mode is ExecutionMode.REFUSED:
            return f"{name} on {machine}: {entry.reason}"
    if not (machine.te_per_gemm or te_recipe(option, machine).is_uniform):
        return (
            f"{option}: Transformer Engine {machine.te_version} has no quantizers per GEMM "
            "(CustomRecipe with HybridQuantizer)"
        )
    return None


def te_recipe(option: Option, machine: Machine) -> TERecipe:
    """Return the recipe that runs an option under Transformer Engine; `te_refusal` must be None."""
    recipe = TERecipe(*(support(Backend.TE, name, machine).recipe for name in option.formats))
    assert all(recipe), f"{option} on {machine}"
    return recipe


@dataclass(frozen=True)
class AvailableOptions:
    """What the linears of a model can run; the same on all ranks.

    Attributes:
        options: those of the settings that some linear can run, in the settings' order.
        refusals: which linears cannot run an option, and why.
        warnings: one line per option that some or all linears cannot run.
    """

    options: tuple[Option, ...]
    refusals: Refusals
    warnings: tuple[str, ...] = ()


def available_options(model: PlannedModel, config: SnipConfig) -> AvailableOptions:
    """All ranks: return what the linears can run of the settings' options.

    With `collect_only` and no plan file all options are returned: they are measured for other
    machines.

    Raises:
        UnsupportedError: on every rank, if no linear can run the lowest precision, so that the
            efficiency target would have no meaning.
    """
    if config.collect_only and config.plan_file is None:
        return AvailableOptions(config.options, {})
    lowest = Option.uniform(config.lowest_format)
    control = model.runtime.topology.control
    refusals = option_refusals(model.linears, (*config.options, lowest), control)
    num_linears = len(model.all_linears)
    options = tuple(o for o in config.options if len(refusals[o]) < num_linears)
    warnings = []
    for option in config.options:
        if refusals[option]:
            some = f"{len(refusals[option])} linears"
            which = some if option in options else "any linear"
            warnings.append(f"{option} is not available to {which}: {reasons(refusals[option])}")
    if not any(option.share_in(config.lowest_format) for option in options):
        raise UnsupportedError(
            f"no linear of this model can run {lowest}, the lowest precision of --snip-formats: "
            f"{reasons(refusals[lowest])}; choose other formats or use --transformer-impl local"
        )
    return AvailableOptions(options, refusals, tuple(warnings))


def option_refusals(
    linears: Sequence[AnyLinear], options: Iterable[Option], control: ProcessGroup | None
) -> dict[Option, dict[str, str]]:
    """All ranks, with the same options: return which linears of the model cannot run them.

    Args:
        linears: this rank's.
        options: in the same order on all ranks.
        control: group of all ranks, or None for one.
    """
    distinct = list(dict.fromkeys(options))
    own = [
        {linear.name: why for linear in linears if (why := linear.refusal(option)) is not None}
        for option in distinct
    ]
    found: dict[Option, dict[str, str]] = {option: {} for option in distinct}
    for rank in gather_json(own, control):
        for option, refused in zip(distinct, rank, strict=True):
            found[option].update(refused)
    return found
