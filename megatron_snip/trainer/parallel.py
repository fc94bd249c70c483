"""Megatron's process groups and random streams for a layout."""

from __future__ import annotations

import torch.distributed as dist
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
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_size,
        # Second groups on gloo serve a checkpoint format that this trainer does not write.
        create_gloo_process_groups=False,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(config.seed + 100 * stage, force_reset_rng=True)


def destroy_parallel_state() -> None:
    """All ranks: end Megatron's groups, so that another layout can be made."""
    # Megatron forgets its groups without ending them, and each holds threads and sockets.
    groups = getattr(parallel_state, "_global_process_group_list", None) or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)
