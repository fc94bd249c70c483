"""All-reduce of small CPU tensors in log2(ranks) exchanges.

gloo sends an all-reduce around a ring: 2 (ranks - 1) messages one after the other, which takes half
a second for one flag at a thousand ranks. Recursive doubling (Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005) needs log2(ranks) rounds. In
each, a rank exchanges its sum with the rank whose number differs in one bit. Ranks beyond the
largest power of two send their value first and receive the result last.

Both partners add the same two values, and a + b = b + a bit by bit, so all ranks end with the same
bits. Each all-reduce of a group has a number of its own as its tag. If a rank left one with an
error that others did not see, the next one times out instead of adding a wrong value.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

LARGEST_BYTES = 1 << 20
"""Above this size the ring, which moves fewer bytes, is as fast for few ranks. For many ranks the
limit is `BYTES_A_RANK` for each rank: a ring's messages grow with the ranks."""

BYTES_A_RANK = 1 << 16

_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""All-reduces that this rank began in each group."""


def suits(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether `tensor` is small and on the CPU, and `group` is of the gloo backend."""
    largest = max(LARGEST_BYTES, dist.get_world_size(group) * BYTES_A_RANK)
    small = tensor.numel() * tensor.element_size() <= largest
    here = tensor.device.type == "cpu" and tensor.is_contiguous()
    return here and small and dist.get_backend(group) == "gloo"


def all_reduce(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All ranks of `group`: add `tensor` up in place and return it, the same bits everywhere.

    Args:
        tensor: on the CPU, contiguous, the same shape and dtype on all ranks.
        group: of the gloo backend.

    Raises:
        RuntimeError: if a partner is gone, or does not answer within the group's timeout.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    power = 1 << (size.bit_length() - 1)
    tag = _next_tag(group)
    received = torch.empty_like(tensor)
    if rank >= power:
        _send(tensor, rank - power, group, tag)
        _receive(tensor, rank - power, group, tag)
        return tensor
    if rank + power < size:
        _receive(received, rank + power, group, tag)
        tensor.add_(received)
    bit = 1
    while bit < power:
        partner = rank ^ bit
        sending = dist.isend(tensor, _global(partner, group), group=group, tag=tag)
        _receive(received, partner, group, tag)
        if sending is not None:
            sending.wait()
        tensor.add_(received)
        bit <<= 1
    if rank + power < size:
        _send(tensor, rank + power, group, tag)
    return tensor


def _next_tag(group: ProcessGroup) -> int:
    """Tags are positive 32-bit integers."""
    _made[group] = _made.get(group, 0) % (2**31 - 1) + 1
    return _made[group]


def _send(tensor: torch.Tensor, to: int, group: ProcessGroup, tag: int) -> None:
    dist.send(tensor, _global(to, group), group=group, tag=tag)


def _receive(tensor: torch.Tensor, source: int, group: ProcessGroup, tag: int) -> None:
    dist.recv(tensor, _global(source, group), group=group, tag=tag)


def _global(rank: int, group: ProcessGroup) -> int:
    return dist.get_global_rank(group, rank)
