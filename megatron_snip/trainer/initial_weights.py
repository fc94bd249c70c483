"""Initial weights, a function of (seed, global name): every layout starts from the same weights.

A rank builds the complete FP32 tensor and takes its shard. Global names count layers, and the
experts of a layer, from 0 over the complete model. Shards, with T tensor-parallel ranks:

    embedding, output_layer, linear_qkv     n / T rows
    linear_fc1                              n / 2T rows of gate and n / 2T rows of up
    linear_proj, linear_fc2                 n / T columns
    norms, routers                          not split

Standard deviations are Megatron's: std, and std / sqrt(2 num_layers) for linear_proj and
linear_fc2.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_snip.linears.discovery import first_local_expert
from megatron_snip.trainer.config import TrainConfig

INIT_STD = 0.02
"""Standard deviation of initial weights."""

_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")
_GATED = "linear_fc1.weight"
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@torch.no_grad()
def initialize_weights(chunk: torch.nn.Module, config: TrainConfig) -> None:
    """Set every parameter of an unwrapped GPTModel; BF16 parameters get the FP32 value rounded."""
    for name, parameter in global_parameters(chunk):
        if _EXPERT.search(name):
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        rank, size = group.rank(), group.size()
        sharded = getattr(parameter, "tensor_model_parallel", False)
        dim: int | None = getattr(parameter, "partition_dim", None) if sharded else None
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= size
        complete = complete_tensor(name, tuple(shape), config)
        parameter.copy_(shard(name, complete, dim, rank, size))


def global_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
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


def complete_tensor(name: str, shape: tuple[int, ...], config: TrainConfig) -> torch.Tensor:
    """Return the initial value of a complete parameter, FP32 on the CPU."""
    if len(shape) == 1:  # the weight of a norm
        return torch.ones(shape)
    digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    std = INIT_STD
    if name.endswith(_RESIDUAL):
        std /= math.sqrt(2.0 * config.num_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def shard(name: str, complete: torch.Tensor, dim: int | None, rank: int, size: int) -> torch.Tensor:
    """Return the shard of one tensor-parallel rank; `dim` is split, or None."""
    if dim is None or size == 1:
        return complete
    if name.endswith(_GATED):
        return torch.cat([half.chunk(size, dim)[rank] for half in complete.chunk(2, dim)], dim)
    return complete.chunk(size, dim)[rank]
