"""Initial weights: each one a function of its global name, the same under every layout.

A rank builds a parameter's whole FP32 tensor from a generator seeded by (seed, global name) and
takes its own shard, so TP=1, TP=2, PP=2 and an interleaved pipeline start from the same weights.
Global names count layers, and a layer's experts, from 0 over the whole model. Shards (dimension 0
is rows):

    embedding, output_layer, linear_qkv     rows [r n / T, (r + 1) n / T)
    linear_fc1                              gate and up are split one by one: [gate_r; up_r]
    linear_proj, linear_fc2                 columns [r n / T, (r + 1) n / T)
    norms, routers                          whole

T and r are the tensor-parallel ranks of the dense linears, or of the experts.

Standard deviations are Megatron's: std, and std / sqrt(2 num_layers) for linear_proj and
linear_fc2, whose outputs add up in the residual stream.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_snip.trainer.config import TrainConfig

_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")
_GATED = "linear_fc1.weight"
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@torch.no_grad()
def initialize_weights(chunk: torch.nn.Module, config: TrainConfig) -> None:
    """Overwrite every parameter of a GPTModel (not yet wrapped) with its initial value.

    Args:
        chunk: a model chunk; a BF16 parameter gets the FP32 value rounded.
        config: gives seed, init_method_std and num_layers.
    """
    for name, parameter in global_parameters(chunk):
        rank, size = _tensor_place(name)
        sharded = getattr(parameter, "tensor_model_parallel", False)
        dim: int | None = getattr(parameter, "partition_dim", None) if sharded else None
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= size
        whole = whole_tensor(name, tuple(shape), config)
        parameter.copy_(shard(name, whole, dim, rank, size))


def global_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (global name, parameter) of a GPTModel chunk.

    Inside a pipeline stage `decoder.layers.N` is local; the layer's own `layer_number` is global
    and 1-based. So is an expert's index on its rank. A tied output layer has the embedding's name.
    """
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            local, rest = name.removeprefix("decoder.layers.").split(".", 1)
            number: Any = chunk.get_submodule(f"decoder.layers.{local}").layer_number
            yield f"decoder.layers.{number - 1}.{_global_expert(rest, chunk)}", parameter
        elif name == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
            yield "embedding.word_embeddings.weight", parameter
        else:
            yield name, parameter


def _global_expert(path: str, chunk: torch.nn.Module) -> str:
    """Return a path within a layer with the expert counted over all ranks."""
    found = _EXPERT.search(path)
    if found is None:
        return path
    config: Any = chunk.config
    rank = parallel_state.get_expert_model_parallel_rank()
    own = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{path[: found.start(1)]}{rank * own + int(found[1])}{path[found.end(1) :]}"


def _tensor_place(name: str) -> tuple[int, int]:
    """Return (rank, size) of the tensor-parallel axis that splits a parameter."""
    if _EXPERT.search(name):
        rank = parallel_state.get_expert_tensor_parallel_rank()
        return rank, parallel_state.get_expert_tensor_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return rank, parallel_state.get_tensor_model_parallel_world_size()


def whole_tensor(name: str, shape: tuple[int, ...], config: TrainConfig) -> torch.Tensor:
    """Return a parameter's whole initial tensor, FP32 on the CPU."""
    if len(shape) == 1:  # the weight of a norm
        return torch.ones(shape)
    digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    std = config.init_method_std
    if name.endswith(_RESIDUAL):
        std /= math.sqrt(2.0 * config.num_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def shard(name: str, whole: torch.Tensor, dim: int | None, rank: int, size: int) -> torch.Tensor:
    """Return one tensor-parallel rank's part of a whole tensor.

    Args:
        name: global name of the parameter.
        whole: the whole tensor.
        dim: dimension that is split, or None.
        rank: tensor-parallel rank, 0-based.
        size: tensor-parallel ranks.
    """
    if dim is None or size == 1:
        return whole
    if name.endswith(_GATED):
        return torch.cat([half.chunk(size, dim)[rank] for half in whole.chunk(2, dim)], dim)
    return whole.chunk(size, dim)[rank]
