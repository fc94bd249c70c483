"""Collectives that NCCL has and gloo lacks: uneven all-gather and reduce-scatter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
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
    """Wrap all_gather for ranks that differ in their first dimension: pad, gather, cut."""

    @functools.wraps(original)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if not _uneven(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        rows = max(t.shape[0] for t in tensor_list)
        padded = tensor.new_zeros((rows, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group=group)
        for target, source in zip(tensor_list, gathered, strict=True):
            target.copy_(source[: target.shape[0]])
        return None

    return all_gather


def uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap reduce_scatter for ranks that differ in their first dimension: all-reduce, cut."""

    @functools.wraps(original)
    def reduce_scatter(
        output: Any,
        input_list: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _uneven(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        total = torch.cat(list(input_list))
        dist.all_reduce(total, op=op, group=group)
        rows = [t.shape[0] for t in input_list]
        output.copy_(torch.split(total, rows)[dist.get_rank(group)])
        return None

    return reduce_scatter


def _uneven(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tuple(t.shape) for t in tensors}) > 1
