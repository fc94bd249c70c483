"""What gloo lacks: an uneven all-gather, and split sizes of an all-to-all that are tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def plain_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_to_all_single to take split sizes as tensors, as the MoE dispatcher passes them."""

    def plain(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        splits = (plain(output_split_sizes), plain(input_split_sizes))
        return original(output, input, *splits, *args, **kwargs)

    return all_to_all_single


def uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_gather for ranks that differ in their first dimension: each one broadcasts."""

    @functools.wraps(original)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({tuple(target.shape) for target in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, target in enumerate(tensor_list):
            dist.broadcast(target, group=group, group_src=rank)
        return None

    return all_gather
