"""Weights that depend on a parameter's name alone, for a model that two training loops build."""

import zlib
from typing import Any

import torch
from megatron.core import parallel_state


def set_weights(chunks: list[Any]) -> list[Any]:
    """Set all matrices of a model's chunks; a tensor-parallel rank has shards of its own."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.dim() > 1:
                noise = torch.Generator().manual_seed(zlib.crc32(name.encode()) + rank)
                values = torch.randn(parameter.shape, generator=noise)
                parameter.data.copy_(values.mul_(0.02))
    return chunks
