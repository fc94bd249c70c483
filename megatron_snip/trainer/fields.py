"""The fields of a training run's settings, with Megatron's argument names.

The text below a field is the help of its flag. This module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_snip.config import Section

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class ModelFields(Section):
    """The model: a Llama-style GPT (RMSNorm, SwiGLU, RoPE, no biases), dense or with experts."""

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

    seq_length: Count = 256
    """Tokens in a sample."""

    make_vocab_size_divisible_by: Count = 128
    """Pad the vocabulary to a multiple of this, independent of the layout."""

    untie_embeddings_and_output_weights: bool = True
    """Use separate weights for embedding and output layer."""

    attention_dropout: Share = 0.0
    """Dropout probability of attention weights."""

    hidden_dropout: Share = 0.0
    """Dropout probability of the outputs of attention and MLP."""

    num_experts: Count | None = None
    """Experts per layer; by default the layers have dense MLPs."""

    moe_router_topk: Count = 2
    """Experts per token."""

    moe_ffn_hidden_size: Count | None = None
    """Width of an expert's SwiGLU MLP; by default ffn_hidden_size."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"
    """Collective that sends tokens to experts on other ranks."""


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
    """Split activations between the linears over the tensor-parallel ranks, by tokens."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state and master weights over the data-parallel ranks."""

    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""

    overlap_param_gather: bool = False
    """Overlap the all-gather of updated weights with the next forward pass. Needs
    use_distributed_optimizer and overlap_grad_reduce."""


class TrainingFields(Section):
    """Training: AdamW, its schedule, data and evaluation."""

    train_iters: Count = 150
    """Training iterations."""

    micro_batch_size: Count = 1
    """Samples per microbatch and rank."""

    global_batch_size: Count = 8
    """Samples per iteration, over all ranks and microbatches."""

    bf16: bool = True
    """Compute in BF16 with FP32 master weights; --no-bf16 computes in FP32."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: `full` layers or `selective` (attention)."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers `full` recomputes: groups of recompute_num_layers (`uniform`) or the first
    recompute_num_layers of a stage (`block`)."""

    recompute_num_layers: Count | None = None
    """Number of layers for recompute_method."""

    seed: Annotated[int, Field(ge=1, lt=2**31)] = 1234
    """Seed of initial weights, data order and dropout."""

    lr: Positive = 3e-3
    """Peak learning rate."""

    min_lr: NotNegative = 3e-4
    """Learning rate after the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"
    """Shape of the decay, from warm-up to train_iters."""

    lr_warmup_iters: Annotated[int, Field(ge=0)] = 10
    """Iterations of linear warm-up."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices."""

    adam_beta1: Share = 0.9
    """Decay of the first moment."""

    adam_beta2: Share = 0.95
    """Decay of the second moment."""

    adam_eps: Positive = 1e-8
    """Added to the root of the second moment."""

    clip_grad: NotNegative = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""

    max_corpus_bytes: Annotated[int, Field(ge=100_000)] = 10_000_000
    """Size limit in bytes of the training text, the source code of Python's standard library."""

    eval_interval: Count = 50
    """Iterations between evaluations. The run also evaluates before the first iteration and at the
    end."""

    eval_iters: Annotated[int, Field(ge=0)] = 4
    """Global batches per evaluation, the same ones each time; 0 turns evaluation off."""


class OutputFields(Section):
    """Output files and checkpoints."""

    save: Path | None = None
    """Folder for checkpoints: every save_interval iterations, at the end, and on SIGTERM, SIGINT or
    SIGUSR1, which then end the run after the iteration in progress (a second SIGINT at once)."""

    save_interval: Count | None = None
    """Iterations between checkpoints; by default only at the end and on a signal."""

    load: Path | None = None
    """Folder of checkpoints to resume from. If it is also the save folder it may be empty: then one
    command starts and resumes a run. Load only checkpoints that you trust: loading can run code."""

    ckpt_step: Count | None = None
    """Load the checkpoint of this iteration instead of the latest."""

    run_dir: Path = Path("runs/train")
    """Directory of the run: config.yaml, versions.json, metrics.jsonl and SNIP's files. A resumed
    run continues these files."""

    tensorboard_dir: Path | None = None
    """Write TensorBoard files to this directory."""

    wandb_project: str | None = None
    """Log to this Weights & Biases project (offline unless WANDB_MODE is set)."""

    overwrite: bool = False
    """Replace the files of a previous run in run_dir. Files that SNIP did not write stay."""


class TrainFields(ModelFields, ParallelFields, TrainingFields, OutputFields):
    """Every field that is a flag without prefix."""
