"""Linears with simulated GEMMs: a method of Megatron's, overridden on the instance.

ColumnParallelLinear and RowParallelLinear call `self._forward_impl(input=..., weight=..., ...)`
by keyword and do everything else (copy to or gather from the tensor-parallel region, reduce, bias)
around it. A linear at bf16 calls the original with all arguments untouched, so it is bitwise
Megatron's own; deleting the instance attribute restores the class's method. The option is read in
every call, so a change of plan compiles nothing and waits for nothing.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from megatron_snip.config import Backend
from megatron_snip.linears.quantized_linear import LinearCall, quantized_linear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.modules import weights_of
from megatron_snip.log import warn_once
from megatron_snip.options import BF16, Option
from megatron_snip.statistics.sharded import is_freed
from megatron_snip.topology import Placement

logger = logging.getLogger(__name__)


class SimulatedLinear(ABC):
    """A `PlannedLinear` whose GEMMs are simulated: its placement, its option and its override.

    Attributes:
        weights: the parameters between iterations: FSDP gives the module others while it runs.
    """

    backend: Backend = "simulate"
    _method: ClassVar[str]
    """The module's method that `_forward` overrides."""
    _bf16_recipe: ClassVar[str]
    """Label of what runs a GEMM in BF16."""

    def __init__(self, module: Any, placements: Sequence[Placement], runtime: Runtime) -> None:
        """Prepare; nothing is overridden yet."""
        self.module = module
        self.name = placements[0].name
        self.placements = tuple(placements)
        self.weights = weights_of(module)
        self.option: Option = BF16
        self._runtime = runtime
        self._original = getattr(module, self._method)
        self._weights_are_freed = any(map(is_freed, self.weights))
        self._saves_input = _frees_inputs(getattr(module, "config", None))

    @property
    def job_option(self) -> Option:
        """The option that stands for what the job itself runs."""
        return BF16

    @property
    def runs_as_job(self) -> bool:
        """Whether the module runs as the job runs it."""
        return self.option == BF16

    @property
    def recipe(self) -> str:
        """Label of what runs the GEMMs; per GEMM where they differ."""
        labels = [
            self._bf16_recipe if name == "bf16" else "simulated" for name in self.option.formats
        ]
        return labels[0] if len(set(labels)) == 1 else "-".join(labels)

    def refusal(self, option: Option) -> str | None:
        """Return why this linear cannot run `option` here, or None if it can."""
        return None  # any format, in any GEMM

    def install(self) -> None:
        """Override the instance's method; idempotent."""
        current = self.module.__dict__.setdefault(self._method, self._forward)
        if current != self._forward:
            raise RuntimeError(
                f"{self.name}: {self._method} is already overridden by {current!r}; undo that first"
            )

    def uninstall(self) -> None:
        """Restore the class's method, unless another override has replaced ours."""
        if self.module.__dict__.get(self._method) == self._forward:
            delattr(self.module, self._method)

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def _is_bf16(self) -> bool:
        return self.option == BF16 or self._runtime.runs_in_bf16(self.name)

    def _simulate(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        placement: Placement,
        tp_group: dist.ProcessGroup | None = None,
        fuse_wgrad: bool = False,
        first_row: int = 0,
        **how: Any,
    ) -> Tensor:
        """Return Y under the option.

        Args:
            input: X.
            weight: W.
            bias: b or None.
            placement: where W is.
            tp_group: process group of the tensor axis; None is the placement's.
            fuse_wgrad: as in `LinearCall`, except under FSDP.
            first_row: the index of Y's first token within the microbatch.
            how: as in `LinearCall`.
        """
        # FSDP frees weights to save memory, so nothing as large is kept of them; and it takes the
        # weight gradient from autograd.
        cache = None if self._weights_are_freed else self._runtime.weight_cache(placement)
        call = LinearCall(
            option=self.option,
            stream=partial(self._runtime.next_stream, placement, first_row),
            tp_group=tp_group or placement.tp.group,
            cache=cache,
            fuse_wgrad=fuse_wgrad and not self._weights_are_freed,
            saves_input=self._saves_input,
            **how,
        )
        return quantized_linear(input, weight, bias, call)


class SimulatedMegatronLinear(SimulatedLinear):
    """One of Megatron's own linears; it has one weight."""

    _method = "_forward_impl"
    _bf16_recipe = "megatron"

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
        input = given["input"]
        weight = given["weight"]
        placement = self.placements[0]
        input_is_split = bool(kwargs.get("sequence_parallel", False))
        output: Tensor
        if self._is_bf16() or not self._quantizable(kwargs):
            output = self._original(*args, **kwargs)
        else:
            output = self._simulate(
                input,
                weight,
                kwargs.get("bias"),
                placement,
                kwargs.get("tp_group"),
                sequence_parallel=input_is_split,
                allreduce_dgrad=bool(kwargs.get("allreduce_dgrad", False)),
                fuse_wgrad=bool(kwargs.get("gradient_accumulation_fusion", False)),
            )
        observer = self._runtime.observer
        if observer is None:
            return output
        return observer.observe(
            placement,
            input,
            weight,
            output,
            input_is_split=input_is_split,
        )

    def _quantizable(self, kwargs: dict[str, Any]) -> bool:
        """Return whether `quantized_linear` supports a call; warn once if it does not."""
        if kwargs.get("grad_output_buffer") is not None:
            reason = "its weight gradient is deferred"
        elif int(kwargs.get("gtp_remat_size") or 1) > 1:
            reason = "its weight is gathered inside the GEMM (gtp_remat_size > 1)"
        else:
            return True
        warn_once(logger, f"{self.name} runs in bf16, not as planned: {reason}")
        return False


def _frees_inputs(config: Any) -> bool:
    """Return whether Megatron frees or offloads inputs of linears after the forward.

    It restores the same tensors before the backward, so these are what a linear must save.
    """
    for flag in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(config, flag, False):
            return True
    if getattr(config, "recompute_granularity", None) != "selective":
        return False
    recomputed = set(getattr(config, "recompute_modules", None) or ())
    # Recomputing any other module frees its output, which is the next linear's input.
    keep_outputs = {"core_attn", "mlp", "moe", "shared_experts"}
    return bool(recomputed - keep_outputs)
