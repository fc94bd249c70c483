"""Megatron's own linears under a plan: `_forward_impl`, overridden on the instance.

ColumnParallelLinear and RowParallelLinear call `self._forward_impl(input=..., weight=..., ...)`
by keyword and do everything else (copy to or gather from the tensor-parallel region, reduce, bias)
around it. A linear at bf16 calls the original with all arguments untouched, so it is bitwise
Megatron's own; deleting the instance attribute restores the class's method. The option is read in
every call, so a change of plan compiles nothing and waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_snip.linears.autograd import QuantizedGemms
from megatron_snip.linears.runtime import Runtime
from megatron_snip.log import warn_once
from megatron_snip.options import BF16, Option
from megatron_snip.topology import Placement

logger = logging.getLogger(__name__)

_METHOD = "_forward_impl"


class PlannedLinear:
    """One of Megatron's own linears: its placement, its option and its override.

    Attributes:
        module: Megatron's linear.
        name: the linear's layout-independent name.
        placements: one entry, as the linear has one weight.
        weights: one entry, [N, K] of this shard.
        option: formats of its GEMMs; assign between iterations only, on all ranks alike.
    """

    backend = "simulate"

    def __init__(self, module: torch.nn.Module, placement: Placement, runtime: Runtime) -> None:
        """Prepare; nothing is overridden yet."""
        self.module = module
        self.name = placement.name
        self.placements = (placement,)
        self.weights: tuple[Any, ...] = (module.weight,)
        self.option: Option = BF16
        self._runtime = runtime
        self._original: Callable[..., Tensor] = getattr(module, _METHOD)
        self._gemms = QuantizedGemms(placement, runtime, getattr(module, "config", None))

    @property
    def recipe(self) -> str:
        """Label of what runs the GEMMs; per GEMM where they differ."""
        return simulated_recipe(self.option, "megatron")

    def refusal(self, option: Option) -> str | None:
        """Return None: every option can be simulated."""
        return None

    def install(self) -> None:
        """Override the instance's `_forward_impl`; idempotent."""
        current = self.module.__dict__.get(_METHOD)
        if current is None:
            setattr(self.module, _METHOD, self._forward)
        elif current != self._forward:
            raise RuntimeError(
                f"{self.name}: {_METHOD} is already overridden by {current!r}; undo that first"
            )

    def uninstall(self) -> None:
        """Restore the class's method, unless another override has replaced ours."""
        if self.module.__dict__.get(_METHOD) == self._forward:
            delattr(self.module, _METHOD)

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bf16 = self.option == BF16 or self._runtime.in_bf16
        plain = bf16 or not self._quantizable(kwargs)
        output = self._original(*args, **kwargs) if plain else self._quantized(args, kwargs)
        observer = self._runtime.observer
        if observer is None:
            return output
        input, weight = _operands(args, kwargs)
        split = bool(kwargs.get("sequence_parallel", False))
        return observer.observe(self.placements[0], input, weight, output, input_is_split=split)

    def _quantized(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._gemms(
            *_operands(args, kwargs),
            kwargs.get("bias"),
            self.option,
            training=self.module.training,
            sequence_parallel=bool(kwargs.get("sequence_parallel", False)),
            allreduce_dgrad=bool(kwargs.get("allreduce_dgrad", False)),
            fuse_wgrad=bool(kwargs.get("gradient_accumulation_fusion", False)),
            tp_group=kwargs.get("tp_group"),
        )

    def _quantizable(self, kwargs: dict[str, Any]) -> bool:
        """Return whether `quantized_linear` supports a call; warn once if it does not."""
        reason = None
        if kwargs.get("grad_output_buffer") is not None:
            reason = "its weight gradient is deferred"
        elif int(kwargs.get("gtp_remat_size") or 1) > 1:
            reason = "its weight is gathered inside the GEMM (gtp_remat_size > 1)"
        if reason:
            warn_once(logger, f"{self.name} runs in bf16, not as planned: {reason}")
        return reason is None


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (input, weight), which Megatron passes by keyword."""
    given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
    return given["input"], given["weight"]


def simulated_recipe(option: Option, bf16: str) -> str:
    """Return the label of simulated GEMMs; `bf16` names what runs the others."""
    labels = [bf16 if name == "bf16" else "simulated" for name in option.formats]
    return labels[0] if len(set(labels)) == 1 else "-".join(labels)
