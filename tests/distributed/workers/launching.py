"""Functions that test_launch.py runs on ranks."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def add(value: float) -> dict[str, float]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "sum": total.item(), "world": int(os.environ["WORLD_SIZE"])}


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the reason why")
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
