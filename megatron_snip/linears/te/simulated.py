"""Transformer Engine's linears with simulated GEMMs: `forward`, overridden on the instance.

A linear at bf16 runs Transformer Engine's own forward with all arguments untouched. At any other
option its GEMMs are simulated as those of Megatron's own linears are (`autograd.quantized_linear`);
what Transformer Engine fuses around them (norm, bias, tensor-parallel communication, accumulation
into main_grad) is done by torch and Megatron's mappings. The rest of the model, its attention
above all, stays Transformer Engine's. So formats without tensor cores on this GPU can be studied at
the speed of a normal model but for the linears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_snip.linears.autograd import QuantizedGemms
from megatron_snip.linears.megatron_linear import simulated_recipe
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.linear import ObservedTELinear
from megatron_snip.linears.te.modules import multiplied_input
from megatron_snip.options import BF16, Option
from megatron_snip.topology import Placement

_METHOD = "forward"


class SimulatedTELinear(ObservedTELinear):
    """One Transformer Engine linear with simulated GEMMs; see `megatron_linear.PlannedLinear`.

    Attributes:
        option: formats of its GEMMs; assign between iterations only, on all ranks alike.
    """

    backend = "simulate"

    def __init__(
        self, module: torch.nn.Module, placements: Sequence[Placement], runtime: Runtime
    ) -> None:
        """Prepare; raises as `ObservedTELinear` does."""
        super().__init__(module, placements, runtime)
        self.option: Option = BF16
        self._original = module.forward
        config = getattr(module, "config", None)
        self._gemms = [QuantizedGemms(placement, runtime, config) for placement in placements]

    @property
    def recipe(self) -> str:
        """Label of what runs the GEMMs; per GEMM where they differ."""
        return simulated_recipe(self.option, "bf16")

    def refusal(self, option: Option) -> str | None:
        """Return None: every option can be simulated."""
        return None

    def install(self) -> None:
        """Override the instance's `forward`; idempotent."""
        if self._hooks:
            return
        if _METHOD in self.module.__dict__:
            raise RuntimeError(f"{self.name}: {_METHOD} is already overridden; undo that first")
        setattr(self.module, _METHOD, self._forward)
        self._hooks = [self._observe()]

    def uninstall(self) -> None:
        """Restore the class's method, unless another override has replaced ours."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.module.__dict__.get(_METHOD) == self._forward:
            delattr(self.module, _METHOD)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.option == BF16 or self._runtime.in_bf16:
            return self._original(*args, **kwargs)
        run = self._run_experts if self._grouped else self._run
        result = run(*args, **kwargs)
        # Transformer Engine's own wgrad overwrites main_grad while this is set.
        self.module.is_first_microbatch = False  # type: ignore[assignment]
        return result

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        module: Any = self.module
        parallel = module.parallel_mode if module.tp_size > 1 else None
        bias = module.bias if module.use_bias else None
        y = self._gemms[0](
            multiplied_input(module, x),
            module.weight,
            None,
            self.option,
            training=module.training,
            sequence_parallel=parallel == "column" and module.sequence_parallel,
            allreduce_dgrad=parallel == "column" and not module.sequence_parallel,
            fuse_wgrad=module.fuse_wgrad_accumulation,
            tp_group=module.tp_group,
        )
        if parallel == "row" and module.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, group=module.tp_group)
        elif parallel == "row":
            y = reduce_from_tensor_model_parallel_region(y, group=module.tp_group)
        if bias is None or module.te_return_bias:
            return y, bias
        return y + bias, None

    def _run_experts(self, x: Tensor, m_splits: Any) -> tuple[Tensor, list[Any] | None]:
        module: Any = self.module
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        biases = [
            getattr(module, f"bias{i}") if module.use_bias else None for i in range(len(sizes))
        ]
        added = [None] * len(sizes) if module.te_return_bias else biases
        experts = zip(self._gemms, torch.split(x, sizes), self.weights, added, strict=True)
        how = {"training": module.training, "fuse_wgrad": module.fuse_wgrad_accumulation}
        y = torch.cat([gemms(rows, w, b, self.option, **how) for gemms, rows, w, b in experts])
        return y, (biases if module.te_return_bias else None)
