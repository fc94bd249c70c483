"""What test_collectives.py runs on ranks."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip import recursive_doubling
from megatron_snip.collectives import sum_over


def recursive_doubling_checks() -> dict[str, Any]:
    """Sums of groups of the first 1, 2, .. ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    for size in range(1, world + 1):
        group = dist.new_group(list(range(size)), backend="gloo")
        if rank >= size:
            continue
        given = torch.randn(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        ring = given.clone()
        dist.all_reduce(ring, group=group)
        assert recursive_doubling.suits(given, group)
        results[str(size)] = {
            "given": given.tolist(),
            "sum": recursive_doubling.all_reduce(given.clone(), group).tolist(),
            "ring": ring.tolist(),
            "flags": int(sum_over(torch.tensor([rank], dtype=torch.int32), group).item()),
        }
    large = torch.full((recursive_doubling.LARGEST_BYTES,), float(rank))
    assert not recursive_doubling.suits(large, dist.group.WORLD)
    results["large"] = float(sum_over(large, dist.group.WORLD)[-1]) * world
    dist.barrier()
    pair = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=10))
    results["out of step"] = _out_of_step(pair) if rank < 2 else None
    dist.barrier()
    return results


def _out_of_step(group: Any) -> str:
    """Ranks 0 and 1: one of them has left an all-reduce out; return what becomes of the next."""
    flag = torch.ones(1, dtype=torch.int32)
    assert int(recursive_doubling.all_reduce(flag, group)) == 2
    if dist.get_rank() == 1:
        recursive_doubling._next_tag(group)
    try:
        return str(int(recursive_doubling.all_reduce(torch.ones(1, dtype=torch.int32), group)))
    except RuntimeError as error:
        return str(error)
