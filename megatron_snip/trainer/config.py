"""TrainConfig: the settings of a training run, with Megatron's argument names.

A YAML file holds the fields as keys and SNIP's settings below `snip:`. Each field is also a flag:
`hidden_size` is `--hidden-size`, `snip: {interval: 40}` is `--snip-interval 40`. Flags override the
file; the text below a field is the help of its flag. Unknown keys are errors. This module imports
no torch.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_snip.config import Section, SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.files import checked, read_yaml

BYTE_VOCABULARY = 257
"""Token ids of the built-in text: 256 bytes and the end of document."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Millions = Annotated[int, Field(ge=1, le=100_000_000)]
Rate = Annotated[float, Field(gt=0.0, le=1e3)]
RateOr0 = Annotated[float, Field(ge=0.0, le=1e3)]
MAX_SAMPLES = 100_000_000
"""Most samples of a run: Megatron's index of them is in memory, some bytes each."""

FractionBelow1 = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelFields(Section):
    """The model: a Llama-style GPT (RMSNorm, SwiGLU, RoPE, no biases), dense or with experts.

    The tensors of a checkpoint depend on each of these settings.
    """

    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Transformer layers."""

    hidden_size: Count = 256
    """Width of the residual stream. Quantization tiles are 128 wide: use a multiple of 128."""

    ffn_hidden_size: Count | None = None
    """Width of the SwiGLU MLP; by default 8/3 of hidden_size rounded down to a multiple of 64."""

    num_attention_heads: Count = 4
    """Attention heads; hidden_size / num_attention_heads is the width of each."""

    num_query_groups: Count | None = None
    """Key and value heads (grouped-query attention); by default one for each attention head."""

    make_vocab_size_divisible_by: Count = 128
    """Pad the vocabulary to a multiple of this, independent of the layout."""

    untie_embeddings_and_output_weights: bool = True
    """Use separate weights for embedding and output layer."""

    num_experts: Count | None = None
    """Experts per layer; by default the layers have dense MLPs."""

    moe_ffn_hidden_size: Count | None = None
    """Width of an expert's SwiGLU MLP; by default ffn_hidden_size."""


class ParallelFields(Section):
    """Parallel layout."""

    tensor_model_parallel_size: Count = 1
    """Tensor-parallel ranks: each linear is split over them."""

    pipeline_model_parallel_size: Count = 1
    """Pipeline stages."""

    num_layers_per_virtual_pipeline_stage: Count | None = None
    """Layers per model chunk. Fewer than the layers of a stage interleaves the pipeline."""

    expert_model_parallel_size: Count = 1
    """Ranks over which the experts of a layer are distributed."""

    expert_tensor_parallel_size: Count | None = None
    """Tensor-parallel ranks of an expert; by default tensor_model_parallel_size."""

    sequence_parallel: bool = False
    """Shard activations outside of the linears over the tensor-parallel ranks, by tokens."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state and master weights over the data-parallel ranks."""

    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""

    overlap_param_gather: bool = False
    """Overlap the all-gather of updated weights with the next forward pass. Needs
    use_distributed_optimizer and overlap_grad_reduce."""


class TrainingFields(Section):
    """Training: AdamW, its schedule, data and evaluation."""

    train_iters: Millions = 150
    """Training iterations."""

    micro_batch_size: Count = 1
    """Samples per microbatch and rank."""

    global_batch_size: Count = 8
    """Samples per iteration, over all ranks and microbatches."""

    seq_length: Count = 256
    """Tokens in a sample."""

    bf16: bool = True
    """Compute in BF16 with FP32 master weights; --no-bf16 computes in FP32."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: `full` layers or `selective` (attention)."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers `full` recomputes: groups of recompute_num_layers (`uniform`) or the first
    recompute_num_layers of a stage (`block`)."""

    recompute_num_layers: Count | None = None
    """Number of layers for recompute_method."""

    moe_router_topk: Count = 2
    """Experts per token."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"
    """Collective that sends tokens to experts on other ranks."""

    attention_dropout: FractionBelow1 = 0.0
    """Dropout probability of attention weights."""

    hidden_dropout: FractionBelow1 = 0.0
    """Dropout probability of the outputs of attention and MLP."""

    seed: Annotated[int, Field(ge=1, lt=2**31)] = 1234
    """Seed of initial weights, data order and dropout."""

    lr: Rate = 3e-3
    """Peak learning rate."""

    min_lr: RateOr0 = 3e-4
    """Learning rate after the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"
    """Shape of the decay, from warm-up to train_iters."""

    lr_warmup_iters: Annotated[int, Field(ge=0, le=100_000_000)] = 10
    """Iterations of linear warm-up."""

    weight_decay: RateOr0 = 0.1
    """Decoupled weight decay of matrices."""

    adam_beta1: FractionBelow1 = 0.9
    """Decay of the first moment."""

    adam_beta2: FractionBelow1 = 0.95
    """Decay of the second moment."""

    adam_eps: Rate = 1e-8
    """Added to the root of the second moment."""

    clip_grad: Annotated[float, Field(ge=0.0, le=1e30)] = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""

    max_corpus_bytes: Annotated[int, Field(ge=100_000, le=1_000_000_000)] = 10_000_000
    """Size limit in bytes of the training text, the source code of Python's standard library."""

    eval_interval: Millions = 50
    """Iterations between evaluations; the first is before training, the last at its end."""

    eval_iters: Annotated[int, Field(ge=0, le=1_000_000)] = 4
    """Global batches per evaluation, the same ones each time; 0 turns evaluation off."""


class OutputFields(Section):
    """Output files and checkpoints."""

    save: Path | None = None
    """Folder for checkpoints: every save_interval iterations, at the end, and on SIGTERM, SIGINT or
    SIGHUP (of a rank also SIGUSR1), which then end the run after the iteration in progress."""

    save_interval: Millions | None = None
    """Iterations between checkpoints; by default only at the end and on a signal."""

    load: Path | None = None
    """Folder of checkpoints to resume from. If it is also the save folder it may be empty: then one
    command starts and resumes a run. Load only checkpoints that you trust: loading can run code."""

    run_dir: Path = Path("runs/train")
    """Directory of the run's files and of its data. A run that resumes from its own checkpoint
    continues its files there."""

    wandb_project: str | None = None
    """Log to this Weights & Biases project (offline unless WANDB_MODE is set)."""

    overwrite: bool = False
    """Let a new run delete the files of an earlier run in run_dir. Files that SNIP did not write
    stay. A run that resumes deletes nothing: it moves files of another run to previous-1/."""


class TrainFields(ModelFields, ParallelFields, TrainingFields, OutputFields):
    """All settings but `snip`; their flags have no prefix."""


class TrainConfig(TrainFields):
    """All settings of a run.

    Raises:
        pydantic.ValidationError: on an unknown key or a value out of range.
        UsageError: if the sizes do not fit each other (`make_train_config` raises only this).
    """

    snip: SnipConfig = SnipConfig()
    """SNIP's settings."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for conflict in _conflicts(self):
            raise UsageError(conflict)
        return self

    @property
    def ffn_width(self) -> int:
        """`ffn_hidden_size`, or its default."""
        return self.ffn_hidden_size or max(64, self.hidden_size * 8 // 3 // 64 * 64)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        unit = self.make_vocab_size_divisible_by
        return -(-BYTE_VOCABULARY // unit) * unit

    @property
    def query_groups(self) -> int:
        """`num_query_groups`, or its default."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def virtual_pipeline_size(self) -> int | None:
        """Model chunks per stage, or None without interleaving."""
        if self.num_layers_per_virtual_pipeline_stage is None:
            return None
        per_stage = self.num_layers // self.pipeline_model_parallel_size
        chunks = per_stage // self.num_layers_per_virtual_pipeline_stage
        return chunks if chunks > 1 else None

    @property
    def expert_tensor_size(self) -> int:
        """`expert_tensor_parallel_size`, or its default."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one model replica, experts included."""
        experts = self.expert_tensor_size * self.expert_model_parallel_size
        stage = math.lcm(self.tensor_model_parallel_size, experts if self.num_experts else 1)
        return stage * self.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel ranks of the dense layers."""
        return world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches per iteration and rank."""
        replicas = self.data_parallel_size(world_size)
        return self.global_batch_size // (self.micro_batch_size * replicas)


def make_train_config(values: dict[str, Any]) -> TrainConfig:
    """Build a TrainConfig from plain values (from YAML or flags).

    Raises:
        UsageError: one line with the field, the value and what is accepted.
    """
    config = checked(TrainConfig, values, "training settings")
    # GEMMs are simulated here, so `auto` means the simulated formats.
    snip = config.snip.model_copy(update={"formats": config.snip.format_entries})
    snip.check_pins()
    return config.model_copy(update={"snip": snip})


def load_train_config(
    file: Path | None,
    flags: dict[str, Any],
    snip_flags: dict[str, Any],
    snip_file: Path | None = None,
) -> TrainConfig:
    """Merge YAML files and flags; flags override files.

    Args:
        file: the YAML file, or None.
        flags: values of TrainFields.
        snip_flags: values of SnipConfig.
        snip_file: a YAML file of SnipConfig; it overrides `file`.

    Raises:
        UsageError: one line with the file or field and what is wrong.
    """
    values = {} if file is None else read_yaml(file)
    section = values.get("snip") or {}
    if not isinstance(section, dict):
        raise UsageError(f"'snip' must hold a mapping of settings, got {type(section).__name__}")
    snip = {} if snip_file is None else read_yaml(snip_file)
    section = {**section, **snip, **snip_flags}
    return make_train_config({**values, **flags, "snip": section})


def check_ranks(config: TrainConfig, world_size: int) -> None:
    """Refuse a number of ranks that does not fit the parallel sizes.

    Raises:
        UsageError: one line with the sizes and what to change.
    """
    need = config.model_parallel_size
    if world_size % need:
        experts = config.expert_model_parallel_size if config.num_experts else 1
        raise UsageError(
            f"tensor_model_parallel_size {config.tensor_model_parallel_size}, "
            f"pipeline_model_parallel_size {config.pipeline_model_parallel_size}, "
            f"expert_model_parallel_size {experts} and expert_tensor_parallel_size "
            f"{config.expert_tensor_size} need a multiple of {need} ranks, got "
            f"{world_size}: start {need} (--nproc-per-node {need}) or reduce the parallel sizes"
        )
    batch = config.micro_batch_size * config.data_parallel_size(world_size)
    stages = (config.pipeline_model_parallel_size, "pipeline_model_parallel_size")
    text = "micro_batch_size x data-parallel ranks"
    sizes = [(config.global_batch_size, "global_batch_size", batch, text)]
    if config.virtual_pipeline_size is not None:
        text = "microbatches per iteration of an interleaved pipeline"
        sizes.append((config.num_microbatches(world_size), text, *stages))
    for conflict in _indivisible(sizes):
        raise UsageError(conflict)


def _conflicts(c: TrainConfig) -> Iterator[str]:
    """Yield one line for each pair of settings that do not fit; Megatron checks more."""
    tp = (c.tensor_model_parallel_size, "tensor_model_parallel_size")
    etp = (c.expert_tensor_size, "expert_tensor_parallel_size")
    ep = (c.expert_model_parallel_size, "expert_model_parallel_size")
    stages = (c.pipeline_model_parallel_size, "pipeline_model_parallel_size")
    chunk = c.num_layers_per_virtual_pipeline_stage
    name = "num_layers_per_virtual_pipeline_stage"
    heads = (2 * c.num_attention_heads, "2 x num_attention_heads")  # rotary embeddings take pairs
    experts = c.num_experts or 0
    if chunk is not None and stages[0] == 1:
        yield f"{name} needs a pipeline, and {stages[1]} is 1; drop it or use more stages"
    if experts and c.moe_router_topk > experts:
        yield f"moe_router_topk {c.moe_router_topk} is more than num_experts {experts}"
    if experts and c.tensor_model_parallel_size > 1 and not c.sequence_parallel:
        yield f"num_experts with tensor_model_parallel_size {tp[0]} needs sequence_parallel"
    yield from _indivisible(  # 0 and 1 where there is nothing to divide
        [
            (c.hidden_size, "hidden_size", *heads),
            (c.num_attention_heads, "num_attention_heads", c.query_groups, "num_query_groups"),
            (c.ffn_width, "ffn_hidden_size", *tp),
            (c.padded_vocab_size, "the padded vocabulary", *tp),
            (c.num_layers, "num_layers", *stages),
            (c.num_layers // stages[0], "layers per pipeline stage", chunk or 1, name),
            (c.sequence_parallel and c.seq_length, "seq_length under sequence_parallel", *tp),
            (experts, "num_experts", *ep),
            (experts and (c.moe_ffn_hidden_size or c.ffn_width), "moe_ffn_hidden_size", *etp),
        ]
    )
    if c.overlap_param_gather and not (c.use_distributed_optimizer and c.overlap_grad_reduce):
        yield "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"
    for kind, iterations in (("train_iters", c.train_iters), ("eval_iters", c.eval_iters)):
        if iterations * c.global_batch_size > MAX_SAMPLES:
            yield (
                f"{kind} {iterations} x global_batch_size {c.global_batch_size} must be at most "
                f"{MAX_SAMPLES} samples"
            )
    if experts and c.moe_router_topk == 1:
        yield "moe_router_topk 1 gives the router no gradient in this model; take 2 or more"
    if c.min_lr > c.lr:
        yield f"min_lr {c.min_lr:g} must not be larger than lr {c.lr:g}"
    if c.lr_warmup_iters >= c.train_iters:
        yield f"lr_warmup_iters {c.lr_warmup_iters} must be less than train_iters {c.train_iters}"
    if c.snip.output_dir is not None:
        yield "snip.output_dir is for Megatron's scripts; here SNIP's files go to run_dir"


def _indivisible(pairs: list[tuple[int, str, int, str]]) -> Iterator[str]:
    for value, name, divisor, divisor_name in pairs:
        if value % divisor:
            yield f"{name} ({value}) must be a multiple of {divisor_name} ({divisor})"
