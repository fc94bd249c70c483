"""All-reduce of small tensors in log2(ranks) exchanges instead of a ring's 2 (ranks - 1).

gloo, which carries what ranks agree on, sends all-reduces around a ring: at a thousand ranks one
flag takes half a second, however small it is. Here every rank exchanges its sum with the rank
whose number differs in one bit, one bit a round (recursive doubling; Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005). Ranks beyond the largest
power of two hand theirs in first and get the result last.

Both partners of an exchange combine the same two values, and a + b = b + a to the last bit, so all
ranks end with the same bits.

Every exchange carries the number of its all-reduce in the group. A rank that left one with an error
that the others did not see is not heard for another in the next: both wait until the group's
timeout, which is a failure that all hear of, and not a wrong sum.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

LARGEST_BYTES = 1 << 20
"""Above this a ring of few ranks, which moves less, is as good."""

BYTES_A_RANK = 1 << 16
"""Above this for every rank a long ring is: its exchanges grow with the ranks, of a quarter of a
millisecond each, and what it saves is less than log2(ranks) times the bytes, at 1 GB/s."""

_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""All-reduces that this rank has begun in each group."""


def largest_bytes(size: int) -> int:
    """Return up to how many bytes are exchanged so between `size` ranks, not sent around a ring."""
    return max(LARGEST_BYTES, size * BYTES_A_RANK)


def suits(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether `tensor` is small and `group` sends it between hosts' memories."""
    small = tensor.numel() * tensor.element_size() <= largest_bytes(dist.get_world_size(group))
    here = tensor.device.type == "cpu" and tensor.is_contiguous()
    return here and small and dist.get_backend(group) == "gloo"


def all_reduce(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All ranks of `group`: add `tensor` up in place and return it, the same bits everywhere.

    Args:
        tensor: on the CPU, contiguous, the same shape and dtype on all ranks.
        group: of the gloo backend.

    Raises:
        RuntimeError: if a partner is gone, or is not heard of within the group's timeout.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    power = 1 << (size.bit_length() - 1)
    tag = _next_tag(group)
    heard = torch.empty_like(tensor)
    if rank >= power:  # hand in, and wait for the result
        _send(tensor, rank - power, group, tag)
        _receive(tensor, rank - power, group, tag)
        return tensor
    if rank + power < size:
        _receive(heard, rank + power, group, tag)
        tensor.add_(heard)
    bit = 1
    while bit < power:
        partner = rank ^ bit
        sending = dist.isend(tensor, _global(partner, group), group=group, tag=tag)
        _receive(heard, partner, group, tag)
        if sending is not None:
            sending.wait()
        tensor.add_(heard)
        bit <<= 1
    if rank + power < size:
        _send(tensor, rank + power, group, tag)
    return tensor


def _next_tag(group: ProcessGroup) -> int:
    """Count an all-reduce; tags are positive 32-bit integers, and 0 is everybody's."""
    _made[group] = _made.get(group, 0) % (2**31 - 1) + 1
    return _made[group]


def _send(tensor: torch.Tensor, to: int, group: ProcessGroup, tag: int) -> None:
    dist.send(tensor, _global(to, group), group=group, tag=tag)


def _receive(tensor: torch.Tensor, source: int, group: ProcessGroup, tag: int) -> None:
    dist.recv(tensor, _global(source, group), group=group, tag=tag)


def _global(rank: int, group: ProcessGroup) -> int:
    return dist.get_global_rank(group, rank)
