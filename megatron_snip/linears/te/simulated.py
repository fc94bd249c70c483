"""Transformer Engine's linears with simulated GEMMs (`--snip-backend simulate`).

Their `forward` is overridden. The rest of the model, also its attention, stays Transformer
Engine's: only the linears are slower than in a normal model.
"""

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
from megatron_snip.linears.te.delayed_wgrad import deferrals
from megatron_snip.linears.te.modules import (
    expert_sizes,
    is_grouped,
    multiplied_input,
    splits_tokens,
    weights_of,
)
from megatron_snip.linears.te.refusals import copied_weight_refusal
from megatron_snip.linears.te.stored_weight import stored_weights
from megatron_snip.linears.te.tap import with_tap
from megatron_snip.options import BF16, Option
from megatron_snip.topology import Placement


class SimulatedTELinear(SimulatedLinear):
    """One Transformer Engine linear with simulated GEMMs.

    A linear at bf16 runs Transformer Engine's own forward with all arguments untouched. At any
    other option its GEMMs are simulated as those of Megatron's own linears are; what Transformer
    Engine fuses around them (norm, bias, tensor-parallel communication, accumulation into
    main_grad) is done by torch and Megatron's mappings.

    Attributes:
        stored: the weights, where the job stores them quantized, or None.
    """

    _method = "forward"
    _bf16_recipe = "bf16"

    def __init__(self, module: Any, placements: Sequence[Placement], runtime: Runtime) -> None:
        """Prepare; nothing is overridden yet."""
        super().__init__(module, placements, runtime)
        self.stored = stored_weights(module, self.weights)
        if self.stored is not None:
            self.stored.keeps_copies = True

    def refusal(self, option: Option) -> str | None:
        """Return why this linear cannot run `option` here, or None if it can."""
        if self.stored is not None and option != BF16:
            reason = copied_weight_refusal(self.module)
            if reason is not None:
                return f"{option}: {reason}"
        return super().refusal(option)

    def delayed_scales(self, placement: Placement) -> None:
        """Return None: a simulated linear runs no delayed scaling."""

    def begin_step(self) -> None:
        """Drop what was made of the weights of the step before."""
        if self.stored is not None:
            self.stored.begin_step()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_bf16():
            output = self._original(*args, **kwargs)
        else:
            run = self._run_experts if is_grouped(self.module) else self._run
            output = run(*args, **kwargs)
            # While this is True, Transformer Engine's own wgrad overwrites main_grad.
            self.module.is_first_microbatch = False
        return with_tap(self, self._runtime.observer, args, kwargs, output)

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what the forward of a linear with one weight returns: Y, and a bias to add."""
        module = self.module
        parallel = module.parallel_mode if module.tp_size > 1 else None
        is_column = parallel == "column"
        placement = self.placements[0]
        first_row = 0
        if splits_tokens(module):
            first_row = placement.tp.rank * x.shape[:-1].numel()
        y = self._simulate(
            multiplied_input(module, x),
            self._multiplied_weights()[0],
            None,
            placement,
            module.tp_group,
            sequence_parallel=is_column and module.sequence_parallel,
            allreduce_dgrad=is_column and not module.sequence_parallel,
            fuse_wgrad=module.fuse_wgrad_accumulation,
            first_row=first_row,
            output_dtype=x.dtype,
            defer_wgrad=deferrals(module, 1)[0],
        )
        if parallel == "row" and module.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, group=module.tp_group)
        elif parallel == "row":
            y = reduce_from_tensor_model_parallel_region(y, group=module.tp_group)
        bias = module.bias if module.use_bias else None
        if bias is None or module.te_return_bias:
            return y, bias
        return y + bias, None

    def _run_experts(self, x: Tensor, m_splits: Any) -> tuple[Tensor, list[Any] | None]:
        """Return what the forward of grouped experts returns: Y, and biases to add."""
        module = self.module
        sizes = expert_sizes(m_splits)
        num_experts = len(sizes)
        biases = [
            getattr(module, f"bias{i}") if module.use_bias else None for i in range(num_experts)
        ]
        added = [None] * num_experts if module.te_return_bias else biases
        experts = zip(
            torch.split(x, sizes),
            self._multiplied_weights(),
            added,
            self.placements,
            deferrals(module, num_experts),
            strict=True,
        )
        outputs = [
            self._simulate(
                rows,
                weight,
                bias,
                placement,
                fuse_wgrad=module.fuse_wgrad_accumulation,
                defer_wgrad=defer,
            )
            for rows, weight, bias, placement, defer in experts
        ]
        y = torch.cat(outputs)
        return y, (biases if module.te_return_bias else None)

    def _multiplied_weights(self) -> Sequence[Tensor]:
        """Return the weights in high precision, through which gradients reach the parameters."""
        return weights_of(self.module) if self.stored is None else self.stored.copies()
