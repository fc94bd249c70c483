"""Sizes: what must divide what, and the linears and stages that follow. Needs no torch.

Per transformer layer, with h = hidden_size, d = head_width, a heads, g query groups, f = ffn_width
(shapes are [out_features, in_features] of the whole weight):

    self_attention.linear_qkv   [(a + 2 g) d, h]     split by query groups over TP
    self_attention.linear_proj  [h, a d]             split by columns
    mlp.linear_fc1              [2 f, h]             gate and up, each split by rows
    mlp.linear_fc2              [h, f]               split by columns

With num_experts each expert has an fc1 and an fc2 of width moe_ffn_hidden_size, split likewise over
the expert-tensor-parallel ranks; a layer's experts share one name, `mlp.experts.linear_fc1`, and a
token meets moe_router_topk of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_snip.errors import UsageError
from megatron_snip.types import linear_name

if TYPE_CHECKING:
    from megatron_snip.trainer.config import TrainConfig

TILE = 128
"""Elements that share a scale in fp8 and fp4; shards of another width cut tiles."""


@dataclass(frozen=True)
class LinearShape:
    """One linear of the model.

    Attributes:
        name: layout-independent, e.g. `decoder.layers.0.mlp.linear_fc1`.
        stage: pipeline stage that holds it.
        out_features: of the whole weight.
        in_features: of the whole weight.
        shard: (out_features, in_features) on one tensor-parallel rank; for linear_fc1 of gate and
            up each.
        num_active: weights of this shape that a token meets; experts of a layer share a name.
    """

    name: str
    stage: int
    out_features: int
    in_features: int
    shard: tuple[int, int]
    num_active: int = 1

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of the three GEMMs for one token."""
        return 6.0 * self.out_features * self.in_features * self.num_active


def linear_shapes(config: TrainConfig) -> tuple[LinearShape, ...]:
    """Return every linear of the model, layer by layer."""
    modules = {**_attention_shapes(config), **_mlp_shapes(config)}
    return tuple(
        LinearShape(linear_name(layer + 1, module), stage_of_layer(config, layer), *shape)
        for layer in range(config.num_layers)
        for module, shape in modules.items()
    )


_Shape = tuple[int, int, tuple[int, int], int]
"""out_features, in_features, shard and num_active of a `LinearShape`."""


def _attention_shapes(config: TrainConfig) -> dict[str, _Shape]:
    tp, hidden = config.tensor_model_parallel_size, config.hidden_size
    attention = config.num_attention_heads * config.head_width
    qkv = attention + 2 * config.query_groups * config.head_width
    return {
        "self_attention.linear_qkv": (qkv, hidden, (qkv // tp, hidden), 1),
        "self_attention.linear_proj": (hidden, attention, (hidden, attention // tp), 1),
    }


def _mlp_shapes(config: TrainConfig) -> dict[str, _Shape]:
    hidden = config.hidden_size
    path, ffn, active, tp = "mlp", config.ffn_width, 1, config.tensor_model_parallel_size
    if config.num_experts is not None:
        path, ffn, active = "mlp.experts", config.expert_ffn_width, config.moe_router_topk
        tp = config.expert_tensor_size
    return {
        f"{path}.linear_fc1": (2 * ffn, hidden, (ffn // tp, hidden), active),
        f"{path}.linear_fc2": (hidden, ffn, (hidden, ffn // tp), active),
    }


def stage_of_layer(config: TrainConfig, layer: int) -> int:
    """Return the pipeline stage that holds a layer (both 0-based)."""
    stages = config.pipeline_model_parallel_size
    chunks = stages * (config.virtual_pipeline_size or 1)
    return layer // (config.num_layers // chunks) % stages


def check_model(config: TrainConfig) -> None:
    """Refuse sizes that do not fit each other, whatever the number of ranks.

    Raises:
        UsageError: one line with the sizes, what is wanted, and what to change.
    """
    _check_attention(config)
    _check_experts(config)
    _check_parallel(config)
    _check_schedule(config)


def check_ranks(config: TrainConfig, world_size: int) -> None:
    """Refuse a number of ranks that the parallel sizes cannot use.

    Raises:
        UsageError: one line with the sizes, what is wanted, and what to change.
    """
    need = config.model_parallel_size
    sizes = (
        f"tensor_model_parallel_size {config.tensor_model_parallel_size} x "
        f"pipeline_model_parallel_size {config.pipeline_model_parallel_size}"
    )
    if config.num_experts is not None:
        sizes += f" with expert_model_parallel_size {config.expert_model_parallel_size}"
    if world_size < need:
        raise UsageError(
            f"{sizes} needs {need} ranks, got {world_size}: start {need} (--nproc-per-node {need}) "
            "or make the parallel sizes smaller"
        )
    if world_size % need:
        raise UsageError(
            f"{world_size} ranks cannot be divided into copies of the model of {need} ranks each "
            f"({sizes}); use a multiple of {need}"
        )
    _divides(
        config.global_batch_size,
        "global_batch_size",
        config.micro_batch_size * config.data_parallel_size(world_size),
        "micro_batch_size x data-parallel ranks",
    )
    if config.virtual_pipeline_size is not None:
        _divides(
            config.num_microbatches(world_size),
            "microbatches a step under an interleaved pipeline",
            config.pipeline_model_parallel_size,
            "pipeline_model_parallel_size",
        )


def tile_warnings(config: TrainConfig) -> tuple[str, ...]:
    """Return one sentence for each kind of linear whose shards do not hold whole tiles."""
    said = {}
    for linear in linear_shapes(config):
        if any(size % TILE for size in linear.shard):
            kind = linear.name.rsplit(".", 1)[1]
            rows, columns = linear.shard
            said[kind] = (
                f"{kind}: a rank's shard is {rows} x {columns}, not multiples of {TILE}; "
                "quantization tiles differ between tensor-parallel sizes"
            )
    return tuple(said.values())


def _divides(value: int, name: str, divisor: int, divisor_name: str) -> None:
    if value % divisor:
        raise UsageError(f"{name} ({value}) must be a multiple of {divisor_name} ({divisor})")


def _check_attention(config: TrainConfig) -> None:
    heads, groups = config.num_attention_heads, config.query_groups
    _divides(config.hidden_size, "hidden_size", heads, "num_attention_heads")
    _divides(heads, "num_attention_heads", groups, "num_query_groups")
    if config.head_width % 2:
        raise UsageError(
            f"hidden_size {config.hidden_size} / num_attention_heads {heads} = {config.head_width} "
            "must be even for rotary position embeddings"
        )
    if config.seq_length > config.longest_sequence:
        raise UsageError(
            f"seq_length {config.seq_length} is longer than max_position_embeddings "
            f"{config.longest_sequence}"
        )


def _check_experts(config: TrainConfig) -> None:
    if config.num_experts is None:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (getattr(config, name) or 1) > 1:
                raise UsageError(
                    f"{name} {getattr(config, name)} spreads experts; give num_experts"
                )
        return
    if config.moe_router_topk > config.num_experts:
        raise UsageError(
            f"moe_router_topk {config.moe_router_topk} is more than num_experts "
            f"{config.num_experts}"
        )
    if config.moe_router_topk == 1 and not config.moe_router_pre_softmax:
        raise UsageError(
            "moe_router_topk 1 needs moe_router_pre_softmax: over one chosen expert a softmax is "
            "1, and the router learns nothing"
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UsageError(
            f"num_experts with tensor_model_parallel_size {config.tensor_model_parallel_size} "
            "needs sequence_parallel"
        )
    ep, tp = config.expert_model_parallel_size, config.expert_tensor_size
    _divides(config.num_experts, "num_experts", ep, "expert_model_parallel_size")
    _divides(config.expert_ffn_width, "moe_ffn_hidden_size", tp, "expert_tensor_parallel_size")


def _check_parallel(config: TrainConfig) -> None:
    tp, tp_name = config.tensor_model_parallel_size, "tensor_model_parallel_size"
    for value, name in (
        (config.num_attention_heads, "num_attention_heads"),
        (config.query_groups, "num_query_groups"),
        (config.ffn_width, "ffn_hidden_size"),
        (config.padded_vocab_size, "the padded vocabulary"),
    ):
        _divides(value, name, tp, tp_name)
    if config.sequence_parallel:
        _divides(config.seq_length, "seq_length under sequence_parallel", tp, tp_name)
    if config.context_parallel_size > 1:
        raise UsageError(
            f"context_parallel_size {config.context_parallel_size}: Megatron-Core splits sequences "
            "in Transformer Engine's attention only, which this trainer does not use; set it to 1"
        )
    _check_pipeline(config)
    if config.overlap_param_gather and not (
        config.use_distributed_optimizer and config.overlap_grad_reduce
    ):
        raise UsageError(
            "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"
        )


def _check_pipeline(config: TrainConfig) -> None:
    stages = config.pipeline_model_parallel_size
    _divides(config.num_layers, "num_layers", stages, "pipeline_model_parallel_size")
    chunk = config.num_layers_per_virtual_pipeline_stage
    if chunk is None:
        return
    if stages == 1:
        raise UsageError(
            "num_layers_per_virtual_pipeline_stage interleaves a pipeline, and "
            "pipeline_model_parallel_size is 1; drop it or use more stages"
        )
    _divides(
        config.num_layers // stages,
        "layers a pipeline stage",
        chunk,
        "num_layers_per_virtual_pipeline_stage",
    )


def _check_schedule(config: TrainConfig) -> None:
    granularity, method = config.recompute_granularity, config.recompute_method
    if granularity == "full" and (method is None or config.recompute_num_layers is None):
        raise UsageError(
            "recompute_granularity full needs recompute_method and recompute_num_layers"
        )
    if granularity != "full" and (method is not None or config.recompute_num_layers is not None):
        raise UsageError(
            "recompute_method and recompute_num_layers belong to recompute_granularity full, "
            f"got {granularity or 'none'}"
        )
    if config.min_lr > config.lr:
        raise UsageError(f"min_lr {config.min_lr:g} must not be larger than lr {config.lr:g}")
    decay = config.lr_decay_iters or config.train_iters
    if config.lr_warmup_iters >= decay:
        raise UsageError(
            f"lr_warmup_iters {config.lr_warmup_iters} must be smaller than "
            f"{'lr_decay_iters' if config.lr_decay_iters else 'train_iters'} {decay}"
        )
