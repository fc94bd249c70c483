"""The settings of a training run as fields, in Megatron's own argument names, group by group.

Each group is a section of `megatron-snip train --help`, each field a flag and a YAML key; the text
under a field is its help. Sizes that must fit each other are checked in sizes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class _Section(BaseModel):
    """Base of a group of fields: frozen, unknown keys refused, field docstrings are the help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelFields(_Section):
    """The model: a Llama-style GPT (RMSNorm, SwiGLU, RoPE, no biases)."""

    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Transformer layers."""

    hidden_size: Count = 256
    """Width of the residual stream. Multiples of 128 keep quantization tiles whole."""

    ffn_hidden_size: Count | None = None
    """Width of the SwiGLU MLP; by default 8/3 of hidden_size rounded down to a multiple of 64."""

    num_attention_heads: Count = 4
    """Attention heads; hidden_size / num_attention_heads is the width of each."""

    num_query_groups: Count | None = None
    """Key and value heads (grouped-query attention); by default one for each attention head."""

    seq_length: Count = 256
    """Tokens in a sample."""

    max_position_embeddings: Count | None = None
    """Longest sequence the model is built for; by default seq_length."""

    vocab_size: Count | None = None
    """Token ids in the data; 257 (bytes and end of document) for the built-in text."""

    make_vocab_size_divisible_by: Count = 128
    """The vocabulary is padded to a multiple of this, whatever the tensor-parallel size is, so
    that every layout trains the same model."""

    untie_embeddings_and_output_weights: bool = True
    """Give the output layer a weight of its own."""

    rotary_base: Count = 10000
    """Base of the rotary position embedding's wavelengths."""

    norm_epsilon: Positive = 1e-5
    """Added to the variance in RMSNorm."""

    init_method_std: Positive = 0.02
    """Standard deviation of initial weights (divided by sqrt(2 num_layers) in linear_proj and
    linear_fc2)."""

    attention_dropout: Share = 0.0
    """Dropout probability of attention weights."""

    hidden_dropout: Share = 0.0
    """Dropout probability of what attention and MLP add to the residual stream."""


class ExpertFields(_Section):
    """A mixture of experts in the place of every MLP, where num_experts says so."""

    num_experts: Count | None = None
    """Experts of each layer; by default one MLP that all tokens go through."""

    moe_router_topk: Count = 2
    """Experts that a token goes through; 1 needs moe_router_pre_softmax."""

    moe_ffn_hidden_size: Count | None = None
    """Width of an expert's SwiGLU MLP; by default ffn_hidden_size."""

    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts before the best are chosen, not over the chosen ones."""

    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """What spreads tokens over experts: a loss over a microbatch, over each sample, or nothing."""

    moe_aux_loss_coeff: NotNegative = 1e-2
    """Weight of that loss beside the language model's."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens reach experts on other ranks: all of them to all ranks, or each where it goes."""


class ParallelFields(_Section):
    """How the model and the data are spread over ranks."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share every linear."""

    pipeline_model_parallel_size: Count = 1
    """Stages that the layers are divided into."""

    num_layers_per_virtual_pipeline_stage: Count | None = None
    """Layers in a model chunk; with fewer than a stage holds, the pipeline is interleaved."""

    expert_model_parallel_size: Count = 1
    """Data-parallel ranks that share a layer's experts."""

    expert_tensor_parallel_size: Count | None = None
    """Ranks that share every linear of an expert; by default tensor_model_parallel_size."""

    context_parallel_size: Count = 1
    """Ranks that share a sequence. Only 1 here: Megatron-Core splits sequences in Transformer
    Engine's attention alone; train through your Megatron-LM script for more."""

    sequence_parallel: bool = False
    """Split the tokens between the linears over the tensor-parallel ranks."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state and master weights over the data-parallel ranks."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass runs; needs use_distributed_optimizer
    and overlap_grad_reduce."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Transport between ranks; by default nccl where there are GPUs, else gloo."""

    distributed_timeout_minutes: Count = 10
    """Minutes until a rank that waits for another gives up."""


class TrainingFields(_Section):
    """Steps, batches and arithmetic."""

    train_iters: Count = 150
    """Training steps."""

    micro_batch_size: Count = 1
    """Samples that a rank handles at once."""

    global_batch_size: Count = 8
    """Samples in a training step, over all ranks and microbatches."""

    bf16: bool = True
    """Compute in BF16 with FP32 master weights; --no-bf16 computes in FP32."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: `full` layers or `selective` (attention)."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers `full` recomputes: groups of recompute_num_layers (`uniform`) or the first
    recompute_num_layers of a stage (`block`)."""

    recompute_num_layers: Count | None = None
    """See recompute_method."""

    seed: Annotated[int, Field(ge=1, lt=2**31)] = 1234
    """Seed of initial weights, data order and dropout."""


class OptimizerFields(_Section):
    """AdamW and its schedule."""

    lr: Positive = 3e-3
    """Peak learning rate."""

    min_lr: NotNegative = 3e-4
    """Learning rate that the decay ends at."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"
    """Shape of the decay."""

    lr_decay_iters: Count | None = None
    """Steps that the decay takes; by default train_iters."""

    lr_warmup_iters: Annotated[int, Field(ge=0)] = 10
    """Steps of linear warm-up."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices."""

    adam_beta1: Beta = 0.9
    """Decay of the first moment."""

    adam_beta2: Beta = 0.95
    """Decay of the second moment."""

    adam_eps: Positive = 1e-8
    """Added to the root of the second moment."""

    clip_grad: NotNegative = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""


class DataFields(_Section):
    """Data and evaluation."""

    data_path: Path | None = None
    """Prefix of a PREFIX.bin and PREFIX.idx in Megatron's indexed format, with vocab_size. By
    default the source code of Python's standard library, as bytes."""

    split: str = "95,5,0"
    """Shares of data_path's documents for training, validation and test."""

    data_cache_path: Path | None = None
    """Directory for the built-in text's tokens; by default megatron-snip in the user's cache
    directory, or in run_dir where that cannot be written."""

    max_corpus_bytes: Annotated[int, Field(ge=100_000)] = 10_000_000
    """Most bytes of the built-in text."""

    eval_interval: Count = 50
    """Steps between two evaluations; there is one before the first step and one at the end."""

    eval_iters: Annotated[int, Field(ge=0)] = 4
    """Global batches of held-out data in an evaluation, always the same ones; 0 for none."""


class CheckpointFields(_Section):
    """Checkpoints: stopping, and going on as if never stopped."""

    save: Path | None = None
    """Folder for checkpoints: every save_interval steps, at the end, and on SIGTERM or SIGUSR1,
    which then end the run after the step in progress."""

    save_interval: Count | None = None
    """Steps between two checkpoints; by default only at the end and on a signal."""

    load: Path | None = None
    """Folder of checkpoints to resume from. A folder without a checkpoint is an error, unless it
    is also the folder of save: then one command both starts and resumes a run. Load only
    checkpoints that you trust: reading one can run code."""

    ckpt_step: Count | None = None
    """Load the checkpoint after so many steps instead of the latest."""

    dist_ckpt_optim_fully_reshardable: bool = False
    """Write use_distributed_optimizer's state so that any layout can read it, which gathers it on
    every rank; otherwise only the number of data-parallel ranks may change."""

    exit_interval: Count | None = None
    """Stop after a step that is a multiple of this, with a checkpoint if save is given."""


class RunFields(_Section):
    """What is written, and where."""

    run_dir: Path = Path("runs/train")
    """Directory of the run: config.yaml, versions.json, metrics.jsonl and what SNIP writes. A run
    that resumes from a checkpoint continues the files in it."""

    tensorboard_dir: Path | None = None
    """Write TensorBoard files to this directory."""

    wandb_project: str | None = None
    """Log to this Weights & Biases project (offline unless WANDB_MODE is set)."""

    overwrite: bool = False
    """Replace the files of a former run in run_dir. Files that SNIP did not write stay."""


class TrainFields(
    ModelFields,
    ExpertFields,
    ParallelFields,
    TrainingFields,
    OptimizerFields,
    DataFields,
    CheckpointFields,
    RunFields,
):
    """Every field that is a flag without prefix."""
