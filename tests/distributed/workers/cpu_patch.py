"""What test_cpu.py runs on ranks."""

from __future__ import annotations

from typing import Any

import megatron.core.models.gpt  # noqa: F401  # imported once, before the ranks are forked
import torch
import torch.distributed as dist

from megatron_snip.patches import cpu


def uneven_collectives() -> dict[str, Any]:
    """Rank r brings r + 1 rows of value r + 1."""
    cpu.install()
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    mine = torch.full((rank + 1, 2), float(rank + 1))
    parts = [torch.empty(r + 1, 2) for r in ranks]
    dist.all_gather(parts, mine)
    gathered = [p.unique().tolist() for p in parts]

    total = torch.empty(rank + 1, 2)
    dist.reduce_scatter(total, [torch.full((r + 1, 2), float(10 * r + rank)) for r in ranks])

    received = torch.empty(len(ranks))
    ones = torch.ones(len(ranks), dtype=torch.int64)
    sent = torch.arange(len(ranks)) + 10.0 * rank
    dist.all_to_all_single(received, sent, ones, ones)
    return {"gathered": gathered, "sum": total.tolist(), "received": received.tolist()}
