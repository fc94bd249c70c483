"""Transformer Engine's linears with simulated GEMMs: `forward`, overridden on the instance.

A linear at bf16 runs Transformer Engine's own forward with all arguments untouched. At any other
option its GEMMs are simulated as those of Megatron's own linears are (`quantized_linear`);
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

from megatron_snip.linears.megatron_linear import SimulatedLinear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.linear import observed
from megatron_snip.linears.te.modules import is_grouped, multiplied_input, weights_of
from megatron_snip.topology import Placement


class SimulatedTELinear(SimulatedLinear):
    """One Transformer Engine linear with simulated GEMMs."""

    _method = "forward"
    _bf16_recipe = "bf16"

    def __init__(self, module: Any, placements: Sequence[Placement], runtime: Runtime) -> None:
        """Prepare; nothing is overridden yet."""
        super().__init__(module, placements, weights_of(module), runtime)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_bf16():
            output = self._original(*args, **kwargs)
        else:
            run = self._run_experts if is_grouped(self.module) else self._run
            output = run(*args, **kwargs)
            # Transformer Engine's own wgrad overwrites main_grad while this is set.
            self.module.is_first_microbatch = False
        return observed(self._runtime.observer, self.module, self.placements, args, kwargs, output)

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        module = self.module
        parallel = module.parallel_mode if module.tp_size > 1 else None
        bias = module.bias if module.use_bias else None
        y = self._simulate(
            multiplied_input(module, x),
            module.weight,
            None,
            self.placements[0],
            module.tp_group,
            sequence_parallel=parallel == "column" and module.sequence_parallel,
            allreduce_dgrad=parallel == "column" and not module.sequence_parallel,
            fuse_wgrad=module.fuse_wgrad_accumulation,
        )
        if parallel == "row" and module.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, group=module.tp_group)
        elif parallel == "row":
            y = reduce_from_tensor_model_parallel_region(y, group=module.tp_group)
        if bias is None or module.te_return_bias:
            return y, bias
        return y + bias, None

    def _run_experts(self, x: Tensor, m_splits: Any) -> tuple[Tensor, list[Any] | None]:
        module = self.module
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        biases = [
            getattr(module, f"bias{i}") if module.use_bias else None for i in range(len(sizes))
        ]
        added = [None] * len(sizes) if module.te_return_bias else biases
        experts = zip(torch.split(x, sizes), self.weights, added, self.placements, strict=True)
        fused = module.fuse_wgrad_accumulation
        y = torch.cat([self._simulate(*each, fuse_wgrad=fused) for each in experts])
        return y, (biases if module.te_return_bias else None)
