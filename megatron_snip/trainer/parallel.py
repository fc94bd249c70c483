"""Megatron's process groups and random streams for a layout."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_snip.trainer.config import TrainConfig


def initialize_parallel_state(config: TrainConfig) -> None:
    """All ranks: make Megatron's groups and seed its random streams.

    torch.distributed is initialized. As in Megatron, data-parallel ranks share a seed and pipeline
    stages do not.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_size,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(config.seed + 100 * stage, force_reset_rng=True)


def destroy_parallel_state() -> None:
    """All ranks: forget Megatron's groups, so that another layout can be made."""
    parallel_state.destroy_model_parallel()
