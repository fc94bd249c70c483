"""All ranks of a job as two binomial trees: messages up to rank 0, and down from it.

Every rank calls every method in the same order. A rank sends and receives at most
4 ceil(log2(ranks)) messages in an exchange, and no rank holds a record of every rank.
collectives.py makes votes, records and sums of these exchanges.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_snip.errors import one_line

logger = logging.getLogger(__name__)

_HEAD_BYTES = 1024
"""A record that fits, with its length, is one message; a longer one is two."""
_LENGTH_BYTES = 8
_NOTE_S = 5.0
"""After a timeout: how long a rank waits for the note of the rank that did not answer."""


class LostRankError(RuntimeError):
    """A rank has ended, or did not answer within the timeout: this rank cannot continue.

    It is no `SnipError`: the ranks can no longer decide together, so nothing may go on.
    """


@dataclass
class Traffic:
    """What a rank has exchanged: the scale benchmark and tests count it.

    Attributes:
        exchanges: how often all ranks took part in something.
        messages: messages that this rank sent or received.
        num_bytes: bytes of them.
    """

    exchanges: int = 0
    messages: int = 0
    num_bytes: int = 0


@dataclass
class Records:
    """Bytes of several ranks, each different record once, with the ranges of its ranks.

    Attributes:
        ranges: by record, in order. A dict compares by hash first.
    """

    ranges: dict[bytes, list[range]]

    def add(self, later: "Records") -> None:
        """Add the records of ranks that come after all ranks of these."""
        for record, theirs in later.ranges.items():
            own = self.ranges.setdefault(record, [])
            if own and own[-1].stop == theirs[0].start:
                own[-1] = range(own[-1].start, theirs[0].stop)
                theirs = theirs[1:]
            own += theirs

    def encoded(self) -> bytes:
        """Return them as one record: a line of JSON with lengths and ranks, and then the bytes."""
        ends = [[[each.start, each.stop] for each in ranges] for ranges in self.ranges.values()]
        head = json.dumps([list(map(len, self.ranges)), ends], separators=(",", ":"))
        return head.encode() + b"\n" + b"".join(self.ranges)

    @classmethod
    def decoded(cls, data: bytes) -> "Records":
        """Return what `encoded` was given."""
        head, _, rest = data.partition(b"\n")
        found: dict[bytes, list[range]] = {}
        at = 0
        for length, ends in zip(*json.loads(head), strict=True):
            found[rest[at : at + length]] = [range(start, stop) for start, stop in ends]
            at += length
        return cls(found)


class RankTree:
    """The ranks of a group; or one rank alone, for which every exchange is the identity.

    An exchange in which a rank has ended, or does not answer within the group's timeout, raises
    `LostRankError`, which names that rank.

    Attributes:
        group: all ranks, for tensors on the CPU; None where there is one rank.
        rank: this rank.
        size: the number of ranks.
        traffic: what this rank has exchanged.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """Read this rank's place."""
        self.group = group
        self.rank = 0
        self.size = 1
        self.traffic = Traffic()
        self._timeout: timedelta | None = None
        self._connected: set[int] = set()
        if group is not None:
            self.rank = group.rank()
            self.size = group.size()
            self._timeout = timeout_of(group)

    def reduce(self, tensor: Tensor, num_sums: int) -> None:
        """All ranks: combine a contiguous tensor over all ranks: sums first, then maxima."""
        if self.group is None:
            return
        self.traffic.exchanges += 1
        flat = tensor.view(-1)
        for bit in self._bits():
            if self.rank & bit:
                self._send(flat, self.rank ^ bit)
                break
            if self.rank | bit < self.size:
                other = torch.empty_like(flat)
                self._receive(other, self.rank | bit)
                if num_sums == flat.numel():  # one operation instead of two on slices: it is a vote
                    flat += other
                else:
                    flat[:num_sums] += other[:num_sums]
                    torch.maximum(flat[num_sums:], other[num_sums:], out=flat[num_sums:])
        self._down(flat)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """All ranks: fill a tensor, on the CPU, with that of rank `source`."""
        if self.group is None:
            return
        self.traffic.exchanges += 1
        # By way of rank 0: a tree of its own would need other connections.
        if source != 0 and self.rank == source:
            self._send(tensor, 0)
        elif source != 0 and self.rank == 0:
            self._receive(tensor, source)
        self._down(tensor)

    def broadcast_bytes(self, record: bytes) -> bytes:
        """All ranks: return rank 0's bytes."""
        if self.group is None:
            return record
        self.traffic.exchanges += 1
        return self._down_bytes(record)

    def gather_bytes(self, own: bytes) -> Records:
        """All ranks: return every rank's bytes, each different one once."""
        records = Records({own: [range(self.rank, self.rank + 1)]})
        if self.group is None:
            return records
        self.traffic.exchanges += 1
        for bit in self._bits():
            if self.rank & bit:
                self._send_bytes(records.encoded(), self.rank ^ bit)
                break
            if self.rank | bit < self.size:
                records.add(Records.decoded(self._receive_bytes(self.rank | bit)))
        return Records.decoded(self._down_bytes(records.encoded() if self.rank == 0 else b""))

    def _bits(self) -> list[int]:
        """Return 1, 2, 4, ... below the number of ranks."""
        return [1 << i for i in range((self.size - 1).bit_length())]

    def _down(self, tensor: Tensor) -> None:
        """Fill every rank's tensor with that of rank 0."""
        parent, children = self._neighbours()
        if parent is not None:
            self._receive(tensor, parent)
        for child in children:
            self._send(tensor, child)

    def _down_bytes(self, record: bytes) -> bytes:
        """Return rank 0's bytes."""
        parent, children = self._neighbours()
        if parent is not None:
            record = self._receive_bytes(parent)
        for child in children:
            self._send_bytes(record, child)
        return record

    def _neighbours(self) -> tuple[int | None, list[int]]:
        """Return the rank above this one, None for rank 0, and those below it.

        A rank with more ranks below it comes first: its part takes longest.
        """
        lowest = self.rank & -self.rank
        above = self.rank ^ lowest if self.rank else None
        bits = [bit for bit in reversed(self._bits()) if bit < lowest or not self.rank]
        return above, [self.rank | bit for bit in bits if self.rank | bit < self.size]

    def _send_bytes(self, record: bytes, rank: int) -> None:
        head = len(record).to_bytes(_LENGTH_BYTES, "little") + record
        self._send(_tensor(head[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")), rank)
        if len(head) > _HEAD_BYTES:
            self._send(_tensor(head[_HEAD_BYTES:]), rank)

    def _receive_bytes(self, rank: int) -> bytes:
        head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
        self._receive(head, rank)
        first = head.numpy().tobytes()
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        record = first[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(record) == length:
            return record
        rest = torch.empty(length - len(record), dtype=torch.uint8)
        self._receive(rest, rank)
        return record + rest.numpy().tobytes()

    def _send(self, tensor: Tensor, rank: int) -> None:
        assert self.group is not None
        self._transfer(self.group.send, tensor, rank)

    def _receive(self, tensor: Tensor, rank: int) -> None:
        assert self.group is not None
        self._transfer(self.group.recv, tensor, rank)

    def _transfer(self, how: Callable[..., Any], tensor: Tensor, rank: int) -> None:
        self.traffic.messages += 1
        self.traffic.num_bytes += tensor.nbytes
        begin = time.monotonic()
        try:
            if rank in self._connected:
                # As dist.send and dist.recv do, whose checks take as long as the message.
                how([tensor], rank, 0).wait()
            else:
                self._connect(how, tensor, rank)
        except RuntimeError as error:
            waited_s = time.monotonic() - begin
            lost = self._lost(rank, waited_s)
            text = f"rank {lost} has ended, or did not answer for {waited_s:.0f} s"
            logger.error("snip: rank %d ends: %s", self.rank, text)
            raise LostRankError(f"{text} ({one_line(error)})") from error

    def _connect(self, how: Callable[..., Any], tensor: Tensor, rank: int) -> None:
        """Make the first transfer with `rank`, within the group's timeout.

        Gloo tries to connect to a rank that has ended for five timeouts (torch 2.13). The ranks
        that wait for this one would give up before it does, and would take it for the lost one.
        """
        errors: list[RuntimeError] = []

        def transfer() -> None:
            try:
                how([tensor], rank, 0).wait()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=transfer, name=f"snip-connect-{rank}", daemon=True)
        thread.start()
        thread.join(None if self._timeout is None else self._timeout.total_seconds())
        if thread.is_alive():
            raise RuntimeError("no connection was made")
        if errors:
            raise errors[0]
        self._connected.add(rank)

    def _lost(self, rank: int, waited_s: float) -> int:
        """Return the rank that is lost: this rank waited for `rank`, which may wait for another.

        Each rank that gives up notes in the job's store for which one it waited. A rank that has
        ended left its note before; one that waits as well gives up at about the same time. Where
        ranks wait for each other in a circle, the lost one is `rank`.
        """
        in_time = self._timeout is not None and waited_s < 0.9 * self._timeout.total_seconds()
        deadline = time.monotonic() + (0.0 if in_time else _NOTE_S)
        # A rank that gives up ends, so it leaves one note, in whichever exchange it was.
        lost = rank
        assert self.group is not None
        prefix = f"snip/lost/{self.group.group_name}"
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{prefix}/{self.rank}", str(rank))
            seen = {self.rank}
            while lost not in seen:
                seen.add(lost)
                key = f"{prefix}/{lost}"
                while not store.check([key]):
                    if time.monotonic() > deadline:
                        return lost
                    time.sleep(0.05)
                lost = int(store.get(key))
        except (RuntimeError, ValueError):  # the rank that had the store has ended
            return lost
        return rank


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's exchanges; None where its backend keeps none."""
    try:
        backend = group._get_backend(group._device_types[0])
    except RuntimeError:  # a backend that is not made before it is used
        return None
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
