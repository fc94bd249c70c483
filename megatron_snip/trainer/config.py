"""TrainConfig: the settings of a training run, with Megatron's argument names.

A YAML file holds the fields as keys and SNIP's settings below `snip:`. Each field is also a flag:
`hidden_size` is `--hidden-size`, `snip: {interval: 40}` is `--snip-interval 40`. Flags override the
file. Unknown keys are errors. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import model_validator

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.files import checked, read_yaml
from megatron_snip.trainer.fields import TrainFields

BYTE_VOCABULARY = 257
"""Token ids of the built-in text: 256 bytes and the end of document."""


class TrainConfig(TrainFields):
    """All settings of a run.

    Raises:
        pydantic.ValidationError: on an unknown key or a value out of range.
        UsageError: if the sizes do not fit each other (`make_train_config` raises only this).
    """

    snip: SnipConfig = SnipConfig()
    """SNIP's settings."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        for conflict in _conflicts(self):
            raise UsageError(conflict)
        return self

    @property
    def ffn_width(self) -> int:
        """`ffn_hidden_size`, or its default."""
        return self.ffn_hidden_size or max(64, self.hidden_size * 8 // 3 // 64 * 64)

    @property
    def expert_ffn_width(self) -> int:
        """`moe_ffn_hidden_size`, or its default."""
        return self.moe_ffn_hidden_size or self.ffn_width

    @property
    def query_groups(self) -> int:
        """`num_query_groups`, or its default."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        unit = self.make_vocab_size_divisible_by
        return -(-BYTE_VOCABULARY // unit) * unit

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
    # The trainer's linears are Megatron's own, whose GEMMs are simulated.
    snip = config.snip.model_copy(update={"formats": config.snip.named_formats})
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
            f"pipeline_model_parallel_size {config.pipeline_model_parallel_size} and "
            f"expert_model_parallel_size {experts} need a multiple of {need} ranks, got "
            f"{world_size}: start {need} (--nproc-per-node {need}) or reduce the parallel sizes"
        )
    batch = config.micro_batch_size * config.data_parallel_size(world_size)
    text = "micro_batch_size x data-parallel ranks"
    divisible = [(config.global_batch_size, "global_batch_size", batch, text)]
    if config.virtual_pipeline_size is not None:
        stages, name = config.pipeline_model_parallel_size, "pipeline_model_parallel_size"
        microbatches = config.num_microbatches(world_size)
        text = "microbatches per iteration of an interleaved pipeline"
        divisible.append((microbatches, text, stages, name))
    for conflict in _indivisible(divisible):
        raise UsageError(conflict)


def _conflicts(c: TrainConfig) -> Iterator[str]:
    """Yield one line for each pair of settings that do not fit; Megatron checks others."""
    tp = (c.tensor_model_parallel_size, "tensor_model_parallel_size")
    stages = (c.pipeline_model_parallel_size, "pipeline_model_parallel_size")
    chunk = c.num_layers_per_virtual_pipeline_stage
    if chunk is not None and stages[0] == 1:
        yield (
            "num_layers_per_virtual_pipeline_stage needs a pipeline, and "
            "pipeline_model_parallel_size is 1; drop it or use more stages"
        )
    heads = (2 * c.num_attention_heads, "2 x num_attention_heads")  # rotary embeddings take pairs
    divisible = [
        (c.hidden_size, "hidden_size", *heads),
        (c.num_attention_heads, "num_attention_heads", c.query_groups, "num_query_groups"),
        (c.ffn_width, "ffn_hidden_size", *tp),
        (c.padded_vocab_size, "the padded vocabulary", *tp),
        (c.num_layers, "num_layers", *stages),
    ]
    if chunk is not None:
        name = "num_layers_per_virtual_pipeline_stage"
        divisible.append((c.num_layers // stages[0], "layers per pipeline stage", chunk, name))
    if c.sequence_parallel:
        divisible.append((c.seq_length, "seq_length under sequence_parallel", *tp))
    if c.num_experts is not None:
        etp = (c.expert_tensor_size, "expert_tensor_parallel_size")
        ep = (c.expert_model_parallel_size, "expert_model_parallel_size")
        divisible.append((c.num_experts, "num_experts", *ep))
        if c.moe_router_topk > c.num_experts:
            yield f"moe_router_topk {c.moe_router_topk} is more than num_experts {c.num_experts}"
        divisible.append((c.expert_ffn_width, "moe_ffn_hidden_size", *etp))
        if tp[0] > 1 and not c.sequence_parallel:
            yield f"num_experts with tensor_model_parallel_size {tp[0]} needs sequence_parallel"
    yield from _indivisible(divisible)
    if c.overlap_param_gather and not (c.use_distributed_optimizer and c.overlap_grad_reduce):
        yield "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"
    if c.min_lr > c.lr:
        yield f"min_lr {c.min_lr:g} must not be larger than lr {c.lr:g}"
    if c.lr_warmup_iters >= c.train_iters:
        yield f"lr_warmup_iters {c.lr_warmup_iters} must be less than train_iters {c.train_iters}"


def _indivisible(pairs: list[tuple[int, str, int, str]]) -> Iterator[str]:
    for value, name, divisor, divisor_name in pairs:
        if value % divisor:
            yield f"{name} ({value}) must be a multiple of {divisor_name} ({divisor})"
