"""The model and its optimizer, as Megatron builds them: GPTModel, DDP, AdamW, scheduler.

Local layer spec (Megatron's own linears, attention and norms; no Transformer Engine), RMSNorm,
SwiGLU, RoPE, no biases, no fused kernels: the same modules on a CPU and on GPUs. Experts are
Megatron's `SequentialMLP`: linears of their own, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.initialize import initialize_weights
from megatron_snip.trainer.runner import StepRunner

OVERLAP_BUCKET = 40_000_000
"""Parameters in a gradient bucket when reduction overlaps the backward pass (Megatron's least)."""


@dataclass(frozen=True)
class TrainingState:
    """What the loop moves forward.

    Attributes:
        runner: the wrapped model chunks and how to run microbatches through them.
        optimizer: Megatron's AdamW, with FP32 master weights under BF16.
        scheduler: of learning rate and weight decay.
    """

    runner: StepRunner
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build_training_state(config: TrainConfig, world_size: int) -> TrainingState:
    """All ranks: build, initialize and wrap the model, and make its optimizer.

    Args:
        config: the run's settings.
        world_size: number of ranks; model-parallel groups exist already.
    """
    transformer = transformer_config(config)
    chunks = build_chunks(config, transformer)
    optimizer = _build_optimizer(config, chunks)
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    runner = StepRunner(
        model=tuple(chunks),
        optimizer=optimizer,
        num_microbatches=config.num_microbatches(world_size),
        seq_length=config.seq_length,
        micro_batch_size=config.micro_batch_size,
    )
    return TrainingState(runner, optimizer, _build_scheduler(config, optimizer))


def transformer_config(config: TrainConfig) -> TransformerConfig:
    """Return Megatron's record of the model and its layout."""
    compute = torch.bfloat16 if config.bf16 else torch.float32
    tp = config.tensor_model_parallel_size
    interleaved = config.virtual_pipeline_size is not None
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_width,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        kv_channels=config.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_size,
        sequence_parallel=config.sequence_parallel and tp > 1,
        recompute_granularity=config.recompute_granularity,
        recompute_method=config.recompute_method,
        recompute_num_layers=config.recompute_num_layers,
        bf16=config.bf16,
        params_dtype=compute,
        pipeline_dtype=compute,
        # Fused kernels are CUDA's or a compiler's; unfused, the CPU and the GPU run alike.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        # Under an interleaved pipeline of two stages a batch would hold two messages between the
        # same two ranks, and they could be taken for each other; unbatched, Megatron orders them.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        **_expert_settings(config),
    )


def _expert_settings(config: TrainConfig) -> dict[str, Any]:
    if config.num_experts is None:
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.expert_ffn_width,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_pre_softmax": config.moe_router_pre_softmax,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": config.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_size,
    }


def build_chunks(
    config: TrainConfig, transformer: TransformerConfig
) -> list[DistributedDataParallel]:
    """All ranks: build this rank's model chunks (one, or one a virtual stage), wrapped."""
    virtual = config.virtual_pipeline_size
    stages = range(virtual) if virtual else [None]
    chunks = [_build_chunk(config, transformer, stage) for stage in stages]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        use_distributed_optimizer=config.use_distributed_optimizer,
        bucket_size=_bucket_size() if config.overlap_grad_reduce else None,
    )
    return [
        DistributedDataParallel(
            config=transformer,
            ddp_config=settings,
            module=chunk,
            # Later chunks' communication overlaps the compute of the first as it is.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]


def _bucket_size() -> int:
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return max(OVERLAP_BUCKET, 1_000_000 * int(ranks))


def _build_chunk(
    config: TrainConfig, transformer: TransformerConfig, vp_stage: int | None
) -> torch.nn.Module:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=config.num_experts, moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.longest_sequence,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
        vp_stage=vp_stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    initialize_weights(model, config)
    model.cuda(torch.cuda.current_device())
    wrapped = Float16Module(transformer, model) if config.bf16 else model
    wrapped.vp_stage = vp_stage
    module: torch.nn.Module = wrapped
    return module


def _build_optimizer(
    config: TrainConfig, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
    )
    rule = _weight_decay_rule(settings)
    return get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False, **rule)


def _weight_decay_rule(settings: OptimizerConfig) -> dict[str, Any]:
    """Keyword that keeps weight decay off the norms, where Megatron wants it said."""
    import megatron.core.optimizer as optimizer

    standard = getattr(optimizer, "get_standard_config_overrides", None)  # new in 0.16
    return {} if standard is None else {"config_overrides": standard(settings)}


def _build_scheduler(config: TrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    # Megatron counts its schedule in samples.
    batch = config.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters * batch,
        lr_decay_steps=(config.lr_decay_iters or config.train_iters) * batch,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    """Initialize nothing: `initialize_weights` sets every weight afterwards."""
    return weight
