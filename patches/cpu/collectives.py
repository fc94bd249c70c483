"""What Megatron-Core expects of NCCL's collectives, for gloo."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def plain_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_to_all_single to take split sizes as arrays, as the MoE dispatcher passes them."""

    @functools.wraps(original)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if hasattr(kwargs.get(name), "tolist"):
                kwargs[name] = kwargs[name].tolist()
        return original(*args, **kwargs)

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


def one_by_one(
    original: Callable[..., AbstractContextManager[Any]],
) -> Callable[..., AbstractContextManager[Any]]:
    """Wrap the manager of collectives that run as one: here each runs on its own.

    gloo copies tensors that are gathered as one to a buffer of the first one's type. Values of
    another type are lost: those of BF16 weights beside the bytes of FP8 or NVFP4 weights.

    And two such calls at a time can crash the process, in torch 2.13 and 2.15. Each of gloo's
    threads notes the name of the operation that it ended, without a lock. The names of operations
    that run as one are long, so they need memory of their own, and two threads free it.
    """

    @functools.wraps(original)
    @contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or dist.group.WORLD
        with original(group) as works:
            yield works
            found = distributed_c10d._world.pg_coalesce_state[group]
            collectives = list(found)
            found.clear()
        for collective in collectives:
            output = [] if collective.dst_tensor is None else [collective.dst_tensor]
            reduction = {} if collective.redop is None else {"op": collective.redop}
            work = collective.op(
                *output, collective.tensor, **reduction, group=group, async_op=True
            )
            works.append(work)
        if not async_ops:
            works.wait()

    return manager
