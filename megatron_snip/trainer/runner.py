"""StepRunner: the wrapped model, and how microbatches run through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_snip.trainer.hooks import ForwardBackward
from megatron_snip.trainer.step import forward_step

DataIterator = Iterator[Any] | list[Iterator[Any]]
"""Yields the microbatches of a step; one iterator a model chunk under an interleaved pipeline."""


@dataclass(frozen=True)
class StepRunner:
    """The wrapped model, and how microbatches run through it.

    Attributes:
        model: this rank's chunks; more than one under an interleaved pipeline.
        optimizer: Megatron's, over all chunks.
        num_microbatches: microbatches a step on this rank.
        seq_length: tokens in a sample.
        micro_batch_size: samples in a microbatch.
    """

    model: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    num_microbatches: int
    seq_length: int
    micro_batch_size: int

    @property
    def function(self) -> ForwardBackward:
        """Megatron's schedule for the layout."""
        schedule: ForwardBackward = get_forward_backward_func()
        return schedule

    def arguments(self, data_iterator: DataIterator, forward_only: bool = False) -> dict[str, Any]:
        """Return the schedule's keyword arguments for one step's microbatches."""
        return {
            "forward_step_func": forward_step,
            "data_iterator": data_iterator,
            "model": list(self.model),
            "num_microbatches": self.num_microbatches,
            "seq_length": self.seq_length,
            "micro_batch_size": self.micro_batch_size,
            "decoder_seq_length": self.seq_length,
            "forward_only": forward_only,
        }

    def zero_gradients(self) -> None:
        """Clear gradient buffers, as before every training step."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def defer_gathers(self) -> None:
        """Stop overlapped parameter gathers without gathering: the weights are complete."""
        for chunk in self.model:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook(param_sync=False)

    def overlap_gathers(self) -> None:
        """Let forward passes gather the weights that the optimizer has updated."""
        for chunk in self.model:
            if chunk.use_forward_hook:
                chunk.enable_forward_pre_hook()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within: all weights are complete, and forward passes do not gather."""
        hooked = [c for c in self.model if c.use_forward_hook and c.remove_forward_pre_hook_handles]
        for chunk in hooked:
            chunk.disable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in hooked:
                chunk.enable_forward_pre_hook()
