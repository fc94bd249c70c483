"""TrainConfig: what to train, in Megatron's own argument names, and SNIP's settings below `snip`.

A YAML file holds these fields as keys and a mapping `snip:`; every field is a flag as well
(`hidden_size` is `--hidden-size`, `snip: {interval: 40}` is `--snip-interval 40`), and flags win.
The text under each field is its help. Unknown keys are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_snip.config import SnipConfig, explain, read_yaml
from megatron_snip.errors import UsageError
from megatron_snip.trainer.sizes import check_model

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]

BYTE_VOCABULARY = 257
"""Tokens of the built-in text: the 256 bytes and an end of document."""


class _Section(BaseModel):
    """Base of a group of fields: frozen, unknown keys refused, field docstrings are the help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelFields(_Section):
    """The model: a Llama-style GPT (RMSNorm, SwiGLU, RoPE, no biases)."""

    num_layers: Count = 4
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


class ParallelFields(_Section):
    """How the model and the data are spread over ranks."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share every linear."""

    pipeline_model_parallel_size: Count = 1
    """Stages that the layers are divided into."""

    num_layers_per_virtual_pipeline_stage: Count | None = None
    """Layers in a model chunk; with fewer than a stage holds, the pipeline is interleaved."""

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
    """Folder of checkpoints to go on from; without one in it the run starts at step 0, so the
    same folder as save's lets one command both start and resume."""

    ckpt_step: Count | None = None
    """Load the checkpoint after so many steps instead of the latest."""

    exit_on_missing_checkpoint: bool = False
    """Refuse to start at step 0 when load holds no checkpoint."""

    dist_ckpt_optim_fully_reshardable: bool = False
    """Write use_distributed_optimizer's state so that any layout can read it, which gathers it on
    every rank; otherwise only the number of data-parallel ranks may change."""

    exit_interval: Count | None = None
    """Stop after a step that is a multiple of this, with a checkpoint if save is given."""


class RunFields(_Section):
    """What is written, and where."""

    run_dir: Path = Path("runs/train")
    """Directory of the run: config.yaml, versions.json, metrics.jsonl and what SNIP writes. A
    former run's files in it are replaced, or continued by a run that goes on from a checkpoint."""


class TrainFields(
    ModelFields,
    ParallelFields,
    TrainingFields,
    OptimizerFields,
    DataFields,
    CheckpointFields,
    RunFields,
):
    """Every field that is a flag without prefix."""


class TrainConfig(TrainFields):
    """All of a run's settings; see the groups for the fields.

    Raises:
        pydantic.ValidationError: on an unknown key or a value out of range.
        UsageError: if sizes do not fit each other.
            `make_train_config` turns both into one line.
    """

    snip: SnipConfig = SnipConfig()
    """SNIP's settings."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        check_model(self)
        return self

    @property
    def ffn_width(self) -> int:
        """`ffn_hidden_size`, or its default."""
        return self.ffn_hidden_size or max(64, self.hidden_size * 8 // 3 // 64 * 64)

    @property
    def query_groups(self) -> int:
        """`num_query_groups`, or its default."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def longest_sequence(self) -> int:
        """`max_position_embeddings`, or its default."""
        return self.max_position_embeddings or self.seq_length

    @property
    def token_ids(self) -> int:
        """`vocab_size`, or its default."""
        return self.vocab_size or BYTE_VOCABULARY

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        unit = self.make_vocab_size_divisible_by
        return -(-self.token_ids // unit) * unit

    @property
    def virtual_pipeline_size(self) -> int | None:
        """Model chunks a stage, or None without interleaving."""
        if self.num_layers_per_virtual_pipeline_stage is None:
            return None
        per_stage = self.num_layers // self.pipeline_model_parallel_size
        chunks = per_stage // self.num_layers_per_virtual_pipeline_stage
        return chunks if chunks > 1 else None

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches a step on each rank."""
        replicas = world_size // self.model_parallel_size
        return self.global_batch_size // (self.micro_batch_size * replicas)


def make_train_config(values: dict[str, Any]) -> TrainConfig:
    """Build a TrainConfig from plain values (YAML's or flags').

    Raises:
        UsageError: one line naming the field, what was got and what is wanted.
    """
    try:
        return TrainConfig(**values)
    except ValidationError as error:
        raise UsageError(f"training settings: {explain(error)}") from None


def load_train_config(
    file: Path | None,
    flags: dict[str, Any],
    snip_flags: dict[str, Any],
    defaults: dict[str, Any] | None = None,
    snip_file: Path | None = None,
) -> TrainConfig:
    """Join YAML files and flags; flags win, field by field.

    Args:
        file: the YAML file, or None for flags alone.
        flags: values of TrainFields.
        snip_flags: values of SnipConfig.
        defaults: values of TrainFields where neither says anything.
        snip_file: a YAML file of SnipConfig alone; wins over `file`.

    Raises:
        UsageError: one line naming the file or field and what is wrong.
    """
    values = {} if file is None else read_yaml(file)
    section = values.get("snip") or {}
    if not isinstance(section, dict):
        raise UsageError(f"'snip' must hold a mapping of settings, got {type(section).__name__}")
    snip = {} if snip_file is None else read_yaml(snip_file)
    section = {**section, **snip, **snip_flags}
    return make_train_config({**(defaults or {}), **values, **flags, "snip": section})
