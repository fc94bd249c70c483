"""JSON between ranks, and one decision for all."""

from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_snip import recursive_doubling
from megatron_snip.collectives import sum_over
from tests.distributed.launch import run_ranks


def test_small_sums_are_right_and_the_same_bits_on_any_number_of_ranks() -> None:
    """FP64 against exact rational sums; sizes that are powers of two and such that are not."""
    results = run_ranks(6, "tests.distributed.test_collectives:recursive_doubling_checks")
    for size in range(1, 7):
        found = [result[str(size)] for result in results[:size]]
        exact = [sum(Fraction(r["given"][i]) for r in found) for i in range(len(found[0]["given"]))]
        for one in found:
            assert one["sum"] == found[0]["sum"]
            assert one["sum"] == pytest.approx([float(v) for v in exact], rel=1e-14)
            assert one["flags"] == size * (size - 1) // 2
            assert one["ring"] == pytest.approx(one["sum"], rel=1e-14)
    assert all(result["large"] == 6 * 15.0 for result in results)
    # Whoever is ahead is not heard for another: no sum at all, and no hang. The rank that times out
    # first closes its connection; the other may see that before its own limit.
    said = [result["out of step"] for result in results[:2]]
    assert not any(one.isdigit() for one in said), said
    assert any("imed out" in one for one in said), said


# ---- on ranks


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
