"""Model, optimizer and scheduler, built with Megatron: GPTModel, DistributedDataParallel, AdamW.

The model is a Llama: RMSNorm, SwiGLU, RoPE, no biases. It uses Megatron's local layer spec (no
Transformer Engine, no fused kernels), so that CPU and GPU run the same modules. Experts are
Megatron's `SequentialMLP`.

Initial weights are a function of (seed, global name): every layout starts from the same weights.
A rank builds the complete FP32 tensor and takes its shard. Global names count layers, and the
experts of a layer, from 0 over the complete model. Shards, with T tensor-parallel ranks:

    embedding, output_layer, linear_qkv     n / T rows
    linear_fc1                              n / 2T rows of gate and n / 2T rows of up
    linear_proj, linear_fc2                 n / T columns
    norms, routers                          not split

Standard deviations are Megatron's: std, and std / sqrt(2 num_layers) for linear_proj and
linear_fc2.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_snip.linears.discovery import first_local_expert
from megatron_snip.trainer.config import TrainConfig

LOSS = "lm loss"
"""Megatron's name of the language-model loss."""

_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")
_GATED = "linear_fc1.weight"
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class TrainingState:
    """The model of this rank and its optimizer.

    Attributes:
        model: The wrapped model chunks; more than one in an interleaved pipeline.
        optimizer: Megatron's AdamW, with FP32 master weights under BF16.
        scheduler: Megatron's scheduler of learning rate and weight decay.
        config: The run's settings.
    """

    model: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    config: TrainConfig

    def arguments(self, data: list[Iterator[Any]], forward_only: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's schedule for one iteration.

        Args:
            data: For each model chunk an iterator over the iteration's microbatches.
            forward_only: Whether to evaluate and not to train.
        """
        config = self.config
        return {
            "forward_step_func": forward_step,
            "data_iterator": data,
            "model": list(self.model),
            "num_microbatches": config.num_microbatches(dist.get_world_size()),
            "seq_length": config.seq_length,
            "micro_batch_size": config.micro_batch_size,
            "forward_only": forward_only,
        }

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside the block all weights are complete and forward passes do not gather."""
        hooked = [chunk for chunk in self.model if chunk.use_forward_hook]
        for chunk in hooked:
            chunk.disable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in hooked:
                chunk.enable_forward_pre_hook()


def initialize_parallel_state(config: TrainConfig) -> None:
    """All ranks: create Megatron's process groups and seed its random streams.

    torch.distributed must be initialized. As in Megatron, data-parallel ranks share a seed and
    pipeline stages do not.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        # Only a checkpoint format that this trainer does not write needs them.
        create_gloo_process_groups=False,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(config.seed + 100 * stage, force_reset_rng=True)


def destroy_parallel_state() -> None:
    """All ranks: destroy Megatron's process groups, so that another layout can be initialized."""
    # Megatron drops its groups without destroying them, and each holds threads and sockets.
    groups = getattr(parallel_state, "_global_process_group_list", None) or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)


def build_training_state(config: TrainConfig) -> TrainingState:
    """All ranks: build, initialize and wrap the model; create its optimizer and scheduler.

    Megatron's process groups must exist (`initialize_parallel_state`).
    """
    transformer = transformer_config(config)
    chunks = _build_chunks(config, transformer)
    optimizer = _build_optimizer(config, chunks)
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    scheduler = _build_scheduler(config, optimizer)
    return TrainingState(tuple(chunks), optimizer, scheduler, config)


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one microbatch through a model chunk, as Megatron's schedules call it.

    Args:
        data_iterator: yields tokens, labels, position_ids and loss_mask, each [b, s].
        model: a chunk; later stages take their input from the stage before.

    Returns:
        The output of the chunk (losses per token [b, s] on the last stage) and the loss function.
    """
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss_sum, batch["loss_mask"])


def _loss_sum(
    mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum of losses, number of tokens, {LOSS: both}); Megatron divides."""
    flat = mask.view(-1).float()
    total = torch.sum(output.float().view(-1) * flat)
    tokens = flat.sum().to(torch.int)
    report = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {LOSS: report}


def transformer_config(config: TrainConfig) -> TransformerConfig:
    """Return Megatron's configuration of the model and its layout.

    Megatron's defaults fuse no kernel, so CPU and GPU run the same operations. They do not free the
    outputs of a pipeline stage, which gloo's isend still reads after it returns.

    Raises:
        ValueError, AssertionError: if Megatron refuses a setting.
    """
    compute = torch.bfloat16 if config.bf16 else torch.float32
    interleaved = config.virtual_pipeline_size is not None
    settings = _shared_fields(config, TransformerConfig) | {
        "ffn_hidden_size": config.ffn_width,
        "num_moe_experts": config.num_experts,
        "moe_aux_loss_coeff": 0.01,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "init_method": _unchanged,
        "output_layer_init_method": _unchanged,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_size,
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        "params_dtype": compute,
        "pipeline_dtype": compute,
        # In an interleaved pipeline of two stages a batch would hold two messages between the same
        # ranks, and they could be swapped. Without batching Megatron orders them.
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
    }
    return TransformerConfig(**settings)


def _shared_fields(config: TrainConfig, record: type[Any]) -> dict[str, Any]:
    """Return the settings that a dataclass of Megatron's has by the same name."""
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _build_chunks(
    config: TrainConfig, transformer: TransformerConfig
) -> list[DistributedDataParallel]:
    virtual = config.virtual_pipeline_size
    stages = range(virtual) if virtual else [None]
    chunks = [_build_chunk(config, transformer, stage) for stage in stages]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16, **_shared_fields(config, DistributedDataParallelConfig)
    )
    return [
        DistributedDataParallel(
            config=transformer,
            ddp_config=settings,
            module=chunk,
            # The communication of later chunks already overlaps the compute of the first.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]


def _build_chunk(config: TrainConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=config.num_experts, normalization="RMSNorm"
        ),
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    initialize_weights(model, config)
    model.cuda(torch.cuda.current_device())
    return Float16Module(transformer, model) if config.bf16 else model


def _build_optimizer(
    config: TrainConfig, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    settings = OptimizerConfig(
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        **_shared_fields(config, OptimizerConfig),
    )
    return get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False)


def _build_scheduler(config: TrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    batch = config.global_batch_size  # Megatron's schedule counts samples
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters * batch,
        lr_decay_steps=config.train_iters * batch,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _unchanged(weight: torch.Tensor) -> torch.Tensor:
    return weight  # `initialize_weights` sets every weight


@torch.no_grad()
def initialize_weights(chunk: torch.nn.Module, config: TrainConfig) -> None:
    """Set every parameter of an unwrapped GPTModel; BF16 parameters get the FP32 value rounded."""
    for name, parameter in _global_parameters(chunk):
        if _EXPERT.search(name):
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        is_split = getattr(parameter, "tensor_model_parallel", False)
        dim = parameter.partition_dim if is_split else None
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= group.size()
        complete = _complete_tensor(name, shape, config)
        parameter.copy_(_shard(name, complete, dim, group.rank(), group.size()))


def _global_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (global name, parameter) of a GPTModel chunk.

    In a pipeline stage `decoder.layers.N` is local; a layer's `layer_number` is global and 1-based.
    The index of an expert is local to its rank. A tied output layer has the embedding's name.
    """
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            local, rest = name.removeprefix("decoder.layers.").split(".", 1)
            number: Any = chunk.get_submodule(f"decoder.layers.{local}").layer_number
            rest = _EXPERT.sub(partial(_global_expert, chunk.config), rest)
            yield f"decoder.layers.{number - 1}.{rest}", parameter
        elif name == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
            yield "embedding.word_embeddings.weight", parameter
        else:
            yield name, parameter


def _global_expert(config: Any, local: re.Match[str]) -> str:
    return f".local_experts.{first_local_expert(config) + int(local[1])}."


def _complete_tensor(name: str, shape: list[int], config: TrainConfig) -> torch.Tensor:
    """Return the initial value of a complete parameter, FP32 on the CPU."""
    if len(shape) == 1:  # the weight of a norm
        return torch.ones(shape)
    digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    std = TransformerConfig.init_method_std
    if name.endswith(_RESIDUAL):
        std /= math.sqrt(2.0 * config.num_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _shard(
    name: str, complete: torch.Tensor, dim: int | None, rank: int, size: int
) -> torch.Tensor:
    """Return the shard of one tensor-parallel rank; `dim` is split, or None."""
    if dim is None:
        return complete
    parts = complete.chunk(2, dim) if name.endswith(_GATED) else [complete]
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
