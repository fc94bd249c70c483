"""The seam on Transformer Engine's linears: Megatron's own per-module recipes, set between steps.

Megatron keeps `te_quant_params` on each of its Transformer Engine linears and, in every forward,
opens the autocast that these ask for. A plan sets them; nothing of Megatron or Transformer Engine
is replaced. Two module hooks do the rest: one before the forward picks the recipe of the moment
(the plan's, or BF16 in measuring passes and BF16 evaluations), one after it hands X, W and G to an
observer. Three traps of Transformer Engine are sprung here:

- It rebuilds quantizers when the recipe's class changes, and (up to 2.20) not when a recipe of
  the same class differs: a changed option makes it forget quantizers and quantized weights.
- It keeps quantized weights until told that a microbatch is the first of its step; Megatron tells
  it only in runs that quantize by themselves: see `te_weights.py`.
- A linear that is BF16 for a while keeps what it had quantized before: forgotten likewise.

A grouped linear holds several experts, which share one recipe: one `TEModule`, one
`PlannedTELinear` an expert.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from megatron_snip.formats import get_format
from megatron_snip.linears import backends
from megatron_snip.linears.backends import Backend, Machine
from megatron_snip.linears.runtime import Mode, Runtime
from megatron_snip.linears.te_modules import (
    gathers_input,
    is_grouped,
    multiplied_input,
    refuse_overlap,
    scatters_output,
    weights_of,
)
from megatron_snip.linears.te_replicas import splits_tokens
from megatron_snip.linears.te_shapes import unfit
from megatron_snip.log import warn_once
from megatron_snip.options import BF16, Option
from megatron_snip.planning.te_recipe import FORMAT_OF_WORD, TERecipe
from megatron_snip.topology import Placement

logger = logging.getLogger(__name__)

_ATTRIBUTE = "te_quant_params"


class TEModule:
    """One Transformer Engine linear of the model under SNIP.

    Attributes:
        module: Megatron's wrapper.
        placements: of its weights, one an expert of a grouped linear, else one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        placements: list[Placement],
        runtime: Runtime,
        machine: Machine,
    ) -> None:
        """Prepare.

        Raises:
            UnsupportedError: if the module's communication allows for one precision only.
        """
        refuse_overlap(module, placements[0].name)
        self.module = module
        self.placements = placements
        self.machine = machine
        self._runtime = runtime
        self._grouped = is_grouped(module)
        self._option = BF16
        self._plan = self._bf16 = quant_params(TERecipe())
        self._original = getattr(module, _ATTRIBUTE)
        self._hooks: list[Any] = []

    @property
    def option(self) -> Option:
        """Formats of its GEMMs; assign between steps only, on all ranks alike."""
        return self._option

    @option.setter
    def option(self, option: Option) -> None:
        if option == self._option:
            return
        self._option = option
        self._plan = quant_params(backends.te_recipe(option, self.machine))
        forget_quantizers(self.module)
        if self._hooks:
            setattr(self.module, _ATTRIBUTE, self._plan)

    @property
    def recipe(self) -> TERecipe:
        """What Transformer Engine runs under the option."""
        return backends.te_recipe(self._option, self.machine)

    def refusal(self, option: Option) -> str | None:
        """Return why this linear cannot run `option` here, or None if it can."""
        reason = backends.refusal(Backend.TE, option, self.machine)
        if reason is not None:
            return reason
        recipe = backends.te_recipe(option, self.machine)
        if self._grouped and not recipe.is_uniform:
            return "grouped experts take one format for all three GEMMs"
        if gathers_input(self.module) and _wgrad_is_finer(recipe):
            return (
                f"{option}: under sequence parallelism Transformer Engine gathers the input as "
                "fprop quantized it, so wgrad cannot have more bits than fprop"
            )
        return unfit(self.module, self.placements[0], recipe)

    def install(self) -> None:
        """Take over the module's recipe; doing so twice changes nothing."""
        if self._hooks:
            return
        self._original = getattr(self.module, _ATTRIBUTE)
        if self._original is not None:
            warn_once(logger, "plans take the place of --te-precision-config-file")
        forget_quantizers(self.module)  # a checkpoint may have brought some along
        setattr(self.module, _ATTRIBUTE, self._plan)
        self._hooks = [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            self.module.register_forward_hook(self._after, with_kwargs=True),
        ]

    def uninstall(self) -> None:
        """Give the module back the recipe that it had."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        setattr(self.module, _ATTRIBUTE, self._original)
        forget_quantizers(self.module)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        bf16 = self._runtime.mode is Mode.BF16
        setattr(module, _ATTRIBUTE, self._bf16 if bf16 else self._plan)

    def _after(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self._runtime.observer is None or not torch.is_grad_enabled():
            return None  # without a gradient (recomputed later) there is nothing to tap
        out, bias = output
        given = dict(zip(("x", "m_splits"), args, strict=False)) | kwargs
        if self._grouped:
            return self._observe_experts(given["x"], given["m_splits"], out), bias
        return self._observe(given["x"], out), bias

    def _observe(self, input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Put a tap on the output."""
        observer = self._runtime.observer
        assert observer is not None
        placement, (weight,) = self.placements[0], weights_of(self.module)
        splits = splits_tokens(self.module)
        return observer.observe(
            placement,
            input,
            weight,
            output,
            input_is_split=splits or gathers_input(self.module),
            output_is_split=splits or scatters_output(self.module),
            prepare_input=lambda rows: multiplied_input(self.module, rows),
        )

    def _observe_experts(
        self, input: torch.Tensor, splits: Any, output: torch.Tensor
    ) -> torch.Tensor:
        """Put a tap on every expert's rows; an expert without tokens shows zero rows."""
        observer = self._runtime.observer
        assert observer is not None
        sizes = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
        pieces = zip(
            self.placements,
            torch.split(input, sizes),
            weights_of(self.module),
            torch.split(output, sizes),
            strict=True,
        )
        return torch.cat([observer.observe(p, x, w, y) for p, x, w, y in pieces])


class PlannedTELinear:
    """One linear (or one expert of a grouped one) under SNIP; see `seam.PlannedLinear`.

    Attributes:
        placement: name and shard.
        module: Megatron's wrapper.
        weight: [N, K] of this shard.
    """

    backend = Backend.TE

    def __init__(self, shared: TEModule, index: int) -> None:
        self.placement = shared.placements[index]
        self.module = shared.module
        self.weight = weights_of(shared.module)[index]
        self._shared = shared

    @property
    def option(self) -> Option:
        """Formats of the GEMMs; assign between steps only, on all ranks alike."""
        return self._shared.option

    @option.setter
    def option(self, option: Option) -> None:
        self._shared.option = option

    @property
    def recipe(self) -> str:
        """What Transformer Engine runs, for people."""
        return str(self._shared.recipe)

    def refusal(self, option: Option) -> str | None:
        """Return why this linear cannot run `option` here, or None if it can."""
        return self._shared.refusal(option)

    def install(self) -> None:
        """Take over the module's recipe; idempotent."""
        self._shared.install()

    def uninstall(self) -> None:
        """Give the module back the recipe that it had; idempotent."""
        self._shared.uninstall()


def _wgrad_is_finer(recipe: TERecipe) -> bool:
    """Whether wgrad would take the input in more bits than fprop.

    A shard that was quantized by two formats is dequantized from its rows, which are fprop's,
    before it is gathered for the backward (`HybridQuantizedTensorStorage.dequantize`, 2.20).
    """
    bits = [get_format(FORMAT_OF_WORD[word]).bits for word in (recipe.fprop, recipe.wgrad)]
    return bits[0] < bits[1]


def quant_params(recipe: TERecipe) -> Any:
    """Return Megatron's TEQuantizationParams: the same recipe in training and evaluation."""
    extension: Any = sys.modules["megatron.core.extensions.transformer_engine"]
    fields: Mapping[str, Any] = recipe.fields()
    return extension.TEQuantizationParams(extension.TEQuantizationRecipe(**fields), None)


def forget_quantizers(module: Any) -> None:
    """Make Transformer Engine build a module's quantizers and quantized weights anew."""
    module.fp8_initialized = False
    module.fp8_meta_tensors_initialized = False
    forget_weights(module)


def forget_weights(module: Any) -> None:
    """Make Transformer Engine quantize a module's weights anew in the next forward."""
    module._fp8_workspaces.clear()
