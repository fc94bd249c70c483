"""TrainConfig: what to train, in Megatron's own argument names, and SNIP's settings below `snip`.

A YAML file holds the fields (fields.py) as keys and a mapping `snip:`; every field is a flag as
well (`hidden_size` is `--hidden-size`, `snip: {interval: 40}` is `--snip-interval 40`), and flags
win. Unknown keys are refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from megatron_snip.config import SnipConfig, explain, read_yaml
from megatron_snip.errors import UsageError
from megatron_snip.trainer.fields import TrainFields
from megatron_snip.trainer.sizes import check_model

__all__ = ["TrainConfig", "TrainFields", "load_train_config", "make_train_config"]

BYTE_VOCABULARY = 257
"""Tokens of the built-in text: the 256 bytes and an end of document."""


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
    def expert_ffn_width(self) -> int:
        """`moe_ffn_hidden_size`, or its default."""
        return self.moe_ffn_hidden_size or self.ffn_width

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
    def expert_tensor_size(self) -> int:
        """`expert_tensor_parallel_size`, or its default."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model, experts included."""
        experts = self.expert_tensor_size * self.expert_model_parallel_size
        stage = math.lcm(self.tensor_model_parallel_size, experts if self.num_experts else 1)
        return stage * self.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that see other samples than each other."""
        return world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches a step on each rank."""
        replicas = self.data_parallel_size(world_size)
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
