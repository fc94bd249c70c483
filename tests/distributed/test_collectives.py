"""Sums over ranks."""

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_snip.collectives import any_rank, sum_together
from tests.distributed.launch import run_ranks


def test_sums_are_right_and_the_same_bits_on_any_number_of_ranks() -> None:
    """FP64 against exact rational sums; sizes that are powers of two and such that are not."""
    results = run_ranks(6, "tests.distributed.test_collectives:sums")
    for size in range(1, 7):
        found = [result[size - 1] for result in results[:size]]
        given = zip(*(r["given"] for r in found), strict=True)
        exact = [sum(map(Fraction, column)) for column in given]
        for one in found:
            assert one["sum"] == found[0]["sum"]
            assert one["sum"] == pytest.approx([float(v) for v in exact], rel=1e-14)
            assert one["any"] == (size == 6)


def sums() -> list[dict[str, Any]]:
    """On ranks: sums over the first 1, 2, .. ranks; a flag is set on the last rank of all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(size)), backend="gloo") for size in range(1, world + 1)]
    found = []
    for group in groups[rank:]:
        given = torch.randn(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        total = torch.cat(sum_together([given[:2], given[2:]], group)).tolist()
        flag = any_rank(rank == world - 1, group)
        found.append({"given": given.tolist(), "sum": total, "any": flag})
    return [{}] * rank + found
