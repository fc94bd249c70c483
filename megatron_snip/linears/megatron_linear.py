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

from megatron_snip.linears.autograd import LinearCall, QuantizedLinear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.simulated_gemm import Cached, uncached
from megatron_snip.log import warn_once
from megatron_snip.options import BF16, Option
from megatron_snip.quantizers import StochasticStream
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
        self._pass_number = -1
        self._num_backwards = 0

    @property
    def recipe(self) -> str:
        """Label of what runs the GEMMs; per GEMM where they differ."""
        labels = ["megatron" if name == "bf16" else "simulated" for name in self.option.formats]
        return labels[0] if len(set(labels)) == 1 else "-".join(labels)

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
        input, weight = _operands(args, kwargs)
        call = LinearCall(
            option=self.option,
            stream=self._next_stream,
            sequence_parallel=bool(kwargs.get("sequence_parallel", False)),
            allreduce_dgrad=bool(kwargs.get("allreduce_dgrad", False)),
            fuse_wgrad=bool(kwargs.get("gradient_accumulation_fusion", False)),
            tp_group=kwargs.get("tp_group") or self.placements[0].tensor.group,
            cached=self._cached(weight),
        )
        output: Tensor = QuantizedLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, kwargs.get("bias"), call
        )
        return output

    def _cached(self, weight: Tensor) -> Cached:
        """Return the cache of the weight's quantized forms; an evaluation caches nothing."""
        if not self.module.training:
            return uncached
        cache, instance = self._runtime.weight_cache, self.placements[0].instance
        return lambda key, make: cache.get((instance, key), weight, make)

    def _quantizable(self, kwargs: dict[str, Any]) -> bool:
        """Return whether `QuantizedLinear` supports a call; warn once if it does not."""
        reason = None
        if kwargs.get("grad_output_buffer") is not None:
            reason = "its weight gradient is deferred"
        elif int(kwargs.get("gtp_remat_size") or 1) > 1:
            reason = "its weight is gathered inside the GEMM (gtp_remat_size > 1)"
        if reason:
            warn_once(logger, f"{self.name} runs in bf16, not as planned: {reason}")
        return reason is None

    def _next_stream(self) -> StochasticStream:
        """Return the stream of this backward; backwards of a pass come in microbatch order."""
        if self._runtime.pass_number != self._pass_number:
            self._pass_number, self._num_backwards = self._runtime.pass_number, 0
        stream = self._runtime.stream(self.placements[0], self._num_backwards)
        self._num_backwards += 1
        return stream


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (input, weight), which Megatron passes by keyword."""
    given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
    return given["input"], given["weight"]
