"""MLPs whose operations Transformer Engine fuses (`--use-transformer-engine-op-fuser`).

Megatron builds a sequence of operations from the parameters of an MLP's two linears and does not
call the linears. So the MLP's `forward` is overridden:

    the job's own option      the fused operations, untouched
    another option for both   the fused operations, in the autocast of that option's recipe
    all else                  the two linears, as a job without the flag runs them: where they are
                              measured, in BF16 evaluations, where their options differ or are
                              simulated, and where the job stores weights quantized

The linears can round differently. So a measured iteration runs once more, with the fused
operations, and that pass trains (`Observations.run`).

The planner gives both linears of such an MLP one option (`PlanningProblem.ties`). Its two kinds are
TEFusedMLP, and experts with `_with_fused_impl` (Megatron-Core 0.18 and later).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.linear import RecipeTELinear
from megatron_snip.linears.te.modules import EXTENSION
from megatron_snip.linears.te.simulated import SimulatedTELinear

_EXPERTS_SWITCH = "_with_fused_impl"
_TENSORS_SWITCH = "_use_grouped_tensor"


class FusedMLP:
    """One MLP with fused operations under a plan.

    Attributes:
        module: Megatron's.
        names: names of the two linears.
    """

    def __init__(
        self, module: Any, linears: Sequence[RecipeTELinear | SimulatedTELinear], runtime: Runtime
    ) -> None:
        """Prepare; nothing is overridden yet."""
        self.module = module
        self.names = tuple(linear.name for linear in linears)
        self._linears = tuple(linears)
        self._runtime = runtime
        self._is_dense = not hasattr(module, _EXPERTS_SWITCH)
        # The attribute that holds the sequence of operations; Megatron builds it when it is None.
        self._operations = "_fused_impl" if self._is_dense else "_fused_ops"
        self._has_grouped_tensors = bool(getattr(module, _TENSORS_SWITCH, False))
        self._original = module.forward
        self._fused_recipe = self._recipe

    def install(self) -> None:
        """Override the instance's method; idempotent."""
        self.module.__dict__.setdefault("forward", self._forward)

    def uninstall(self) -> None:
        """Restore the class's method, unless another override has replaced ours."""
        if self.module.__dict__.get("forward") == self._forward:
            del self.module.__dict__["forward"]
            self._set_fused(True)

    @property
    def _recipe(self) -> str:
        return self._linears[0].recipe

    def _is_fused(self) -> bool:
        runtime = self._runtime
        # An observer taps the linears, which the fused operations do not call.
        if runtime.observer is not None or any(map(runtime.runs_in_bf16, self.names)):
            return False
        if all(linear.runs_as_job for linear in self._linears):
            return True
        return len({linear.recipe for linear in self._linears}) == 1 and all(
            isinstance(linear, RecipeTELinear) and linear.stored is None for linear in self._linears
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        is_fused = self._is_fused()
        self._set_fused(is_fused)
        if not is_fused:
            if self._is_dense:  # TEFusedMLP's own forward has no switch: skip it
                return MLP.forward(self.module, *args, **kwargs)
            return self._original(*args, **kwargs)
        if self._recipe != self._fused_recipe:
            # Operations reuse quantizers by the recipe's class, as modules do.
            setattr(self.module, self._operations, None)
            self._fused_recipe = self._recipe
        with self._autocast():
            return self._original(*args, **kwargs)

    def _set_fused(self, is_fused: bool) -> None:
        # It stays so until the next forward: Megatron reads it again for delayed weight gradients.
        if self._is_dense:
            return
        setattr(self.module, _EXPERTS_SWITCH, is_fused)
        if self._has_grouped_tensors:
            # After 0.19 the fuser implies grouped tensors. Without it the linears run as they do
            # without grouped tensors: they know their experts' sizes on the host.
            setattr(self.module, _TENSORS_SWITCH, is_fused)
            for linear in self._linears:
                if hasattr(linear.module, "use_grouped_tensor"):
                    linear.module.use_grouped_tensor = is_fused

    def _autocast(self) -> Any:
        linear = self._linears[0]
        if linear.runs_as_job or not isinstance(linear, RecipeTELinear):
            return nullcontext()
        extension: Any = sys.modules[EXTENSION]
        return extension._get_fp8_autocast_for_quant_params(
            linear.planned_params, self.module.training
        )


def fused_mlps(chunk: torch.nn.Module, linears: Sequence[Any], runtime: Runtime) -> list[FusedMLP]:
    """Return the MLPs of a chunk whose operations are fused, with their linears."""
    by_module = {id(linear.module): linear for linear in linears}
    found = []
    for module, own in _with_linears(chunk):
        planned = [by_module[id(linear)] for linear in own if id(linear) in by_module]
        if len(planned) == 2:
            found.append(FusedMLP(module, planned, runtime))
    return found


def fused_linears(chunk: torch.nn.Module) -> list[Any]:
    """Return the modules of a chunk whose operations are fused with another's.

    Megatron does not call them, so it does not read what a precision file gives them.
    """
    return [linear for _, own in _with_linears(chunk) for linear in own]


def _with_linears(chunk: torch.nn.Module) -> Iterator[tuple[Any, list[Any]]]:
    """Yield (MLP with fused operations, its two linears)."""
    for module in chunk.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "TEFusedMLP" not in kinds and not getattr(module, _EXPERTS_SWITCH, False):
            continue
        own = [getattr(module, name, None) for name in ("linear_fc1", "linear_fc2")]
        if None not in own:
            yield module, own
