"""Exchanges between all ranks of a job: sums, JSON records, one decision for all.

`Control` is the control plane. Every rank calls its methods in the same order. Each exchange goes
up a binomial tree to rank 0 and down another one, so a rank sends and receives at most
4 log2(ranks) messages, and no rank holds a record of every rank. Records travel as JSON; nothing is
pickled. `sum_over` and `sum_together` add tensors of the model on the groups of its layout.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_snip.errors import SnipError, UnsupportedError, UsageError, one_line
from megatron_snip.log import log_failure

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_SHOWN = 3
"""Of different messages of failed ranks, and of runs of ranks with the same one."""

_HEAD_BYTES = 1024
"""A record that fits, with its length, is one message; a longer one is two."""
_LENGTH_BYTES = 8
_LAZY = "TORCH_GLOO_LAZY_INIT"
_NOTE_S = 5.0
"""After a timeout: how long a rank waits for the note of the rank that did not answer."""


class RemoteFailure(SnipError):
    """At least one rank failed; every rank raises this with the same message."""

    def __init__(self, what: str, failures: Mapping[str, Sequence[range]]) -> None:
        """`failures` has the ranks of each message."""
        shown = [
            f"{ranks_text(ranks)}: {text}" for text, ranks in islice(failures.items(), MOST_SHOWN)
        ]
        rest = islice(failures.values(), MOST_SHOWN, None)
        num_more = sum(len(run) for ranks in rest for run in ranks)
        if num_more:
            shown.append(f"{num_more} more, see their logs")
        super().__init__(f"{what} failed on {'; '.join(shown)}")


class LostRankError(RuntimeError):
    """A rank has ended, or did not answer within the timeout: this rank cannot continue.

    It is no `SnipError`: the ranks can no longer decide together, so nothing may go on.
    """


@dataclass(frozen=True)
class Gathered:
    """What all ranks gave, each different value once, in the order of the first rank that gave it.

    Attributes:
        values: the different values.
        ranks: the ranks that gave each, as runs in ascending order.
    """

    values: tuple[Any, ...]
    ranks: tuple[tuple[range, ...], ...]

    def by_rank(self) -> Iterator[Any]:
        """Yield every rank's value, in rank order; equal ones are the same object."""
        runs = [
            (run, value)
            for value, ranks in zip(self.values, self.ranks, strict=True)
            for run in ranks
        ]
        for run, value in sorted(runs, key=lambda pair: pair[0].start):
            for _ in run:
                yield value


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


@dataclass(eq=False)
class Control:
    """All ranks of a job, for votes, records and small tables on the CPU; or one rank alone.

    All ranks call every method together, in the same order. With one rank every method does what
    that rank alone would: a record still takes the way through JSON.

    Sums are added in a fixed order, and every rank gets rank 0's bits.

    An exchange in which a rank has ended, or does not answer within the group's timeout, raises
    `LostRankError`, which names that rank.

    Attributes:
        group: all ranks, for tensors on the CPU; None where there is one rank.
        rank: this rank.
        size: the number of ranks.
        traffic: what this rank has exchanged.
    """

    group: ProcessGroup | None = None
    rank: int = field(init=False, default=0)
    size: int = field(init=False, default=1)
    traffic: Traffic = field(init=False, default_factory=Traffic)

    def __post_init__(self) -> None:
        """Read this rank's place."""
        if self.group is not None:
            self.rank = self.group.rank()
            self.size = self.group.size()
            self._timeout = timeout_of(self.group)

    @classmethod
    def of_all_ranks(cls) -> "Control":
        """All ranks: return a control plane over all ranks of the job.

        It is a gloo group with the timeout of the default group, which Megatron sets by
        `--distributed-timeout-minutes`.

        Its ranks connect when they first exchange something, and then to the few ranks next to them
        in the trees. torch 2.8 and later do so if TORCH_GLOO_LAZY_INIT is set when the group is
        made. torch before 2.8 does not know it, and connects every rank to every other one: the
        same results, but N^2 connections, which take minutes from 4,000 ranks on.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        default = dist.distributed_c10d._get_default_group()
        before = os.environ.get(_LAZY)
        os.environ[_LAZY] = "1"
        try:
            return cls(dist.new_group(backend="gloo", timeout=timeout_of(default)))
        finally:
            if before is None:
                del os.environ[_LAZY]
            else:
                os.environ[_LAZY] = before

    # ---- numbers --------------------------------------------------------------------------------

    def sum_(self, tensor: Tensor, maxima: Tensor | None = None) -> Tensor:
        """Add `tensor` up over all ranks, in place, and return it.

        Args:
            tensor: on the CPU, of the same shape on all ranks.
            maxima: also of the same shape on all ranks: it gets the largest of each number, in the
                same exchange. Both are then exchanged in FP64.
        """
        if self.group is None:
            return tensor
        if maxima is None:
            total = tensor.contiguous()
            self._reduce(total, total.numel())
            return tensor.copy_(total) if total is not tensor else tensor
        both = torch.cat([tensor.reshape(-1).double(), maxima.reshape(-1).double()])
        self._reduce(both, tensor.numel())
        sums, largest = torch.split(both, [tensor.numel(), maxima.numel()])
        maxima.copy_(largest.view_as(maxima))
        return tensor.copy_(sums.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank."""
        return int(self.sum_(torch.tensor([int(flag)], dtype=torch.int32)).item()) > 0

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Fill `tensor`, on the CPU, with that of rank `source`, and return it."""
        if self.group is not None:
            self.traffic.exchanges += 1
            # By way of rank 0: a tree of its own would need other connections.
            if source != 0 and self.rank == source:
                self._send(tensor, 0)
            elif source != 0 and self.rank == 0:
                self._receive(tensor, source)
            self._down(tensor)
        return tensor

    # ---- records --------------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` (others pass anything).

        Raises:
            TypeError: on rank 0, if `value` is not JSON.
        """
        record = _encoded(value) if self.rank == 0 else b""
        if self.group is not None:
            self.traffic.exchanges += 1
            record = self._down_bytes(record)
        return json.loads(record)

    def gather(self, what: str, action: Callable[[], Any], may_refuse: bool = True) -> Gathered:
        """Run `action` on every rank; return what all ranks' actions returned, which is JSON.

        Pipeline stages and experts differ, so a rank may refuse what others accept.

        Args:
            what: what is done, for messages.
            action: what every rank does.
            may_refuse: whether an UnsupportedError or a UsageError is raised on every rank as it
                is; else it is a failure like others.

        Raises:
            UnsupportedError: on every rank, if `action` raised one on any; it has the messages of
                all.
            UsageError: on every rank, the first one that `action` raised on any.
            RemoteFailure: on every rank, if `action` raised another Exception on any, or its result
                is not JSON.
        """
        _, found = self._agree(what, action, lambda result: result, refusals=may_refuse)
        return found

    def attempt(self, what: str, action: Callable[[], T]) -> T:
        """Run `action`, then agree: either every rank returns its result, or every rank raises.

        `action` must not itself communicate in a way that hangs when a peer raises.

        Raises:
            RemoteFailure: on every rank, if `action` raised an Exception on any.
        """
        result, _ = self._agree(what, action, lambda _: None, refusals=False)
        return result

    def on_rank_0(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; return its result, JSON, on every rank.

        Raises:
            UsageError: on every rank, if `action` raised one; it has the same message and field.
            RemoteFailure: on every rank, if `action` raised another Exception or its result is not
                JSON.
        """
        found: Any = None
        if self.rank == 0:
            try:
                found = {"result": action()}
                _encoded(found)  # what cannot be sent is an error here
            except UsageError as error:
                found = {"message": error.message, "field": error.field}
            except Exception as error:  # any error must reach all ranks
                found = {"failure": log_failure(logger, what, error)}
        found = self.broadcast(found)
        if "message" in found:
            raise UsageError(found["message"], found["field"])
        if "failure" in found:
            raise RemoteFailure(what, {found["failure"]: [range(1)]})
        return found["result"]

    def _agree(
        self, what: str, action: Callable[[], T], shared: Callable[[T], Any], refusals: bool
    ) -> tuple[T, Gathered]:
        """Run `action`; in one exchange, get what every rank shares of its result, or fail alike.

        Args:
            what: what is done, for messages.
            action: what this rank does.
            shared: given its result, returns what all ranks get, which is JSON.
            refusals: whether an UnsupportedError or a UsageError is raised on every rank as it is;
                else it is a failure like others.

        Raises:
            UnsupportedError: on every rank, if an action raised one and `refusals` is set.
            UsageError: likewise.
            RemoteFailure: on every rank, if an action failed.
        """
        result: T | None = None
        try:
            result = action()
            own = _encoded({"result": shared(result)})
        except Exception as error:  # any error must reach all ranks
            if refusals and isinstance(error, UnsupportedError):
                own = _encoded({"refusals": error.messages})
            elif refusals and isinstance(error, UsageError):
                own = _encoded({"message": error.message, "field": error.field})
            else:
                own = _encoded({"failure": log_failure(logger, what, error)})
        records = self._gather_bytes(own)
        values = [json.loads(record) for record in records.runs]
        ranks = [tuple(runs) for runs in records.runs.values()]
        failures: dict[str, Sequence[range]] = {}
        refused: dict[str, None] = {}
        for value, runs in zip(values, ranks, strict=True):
            if "failure" in value:
                failures[value["failure"]] = runs
            refused |= dict.fromkeys(value.get("refusals", ()))
        if failures:
            raise RemoteFailure(what, failures)
        if refused:
            raise UnsupportedError(*refused)
        for value in values:
            if "message" in value:
                raise UsageError(value["message"], value["field"])
        found = Gathered(tuple(value["result"] for value in values), tuple(ranks))
        return result, found  # type: ignore[return-value]  # no rank failed

    def _gather_bytes(self, own: bytes) -> "_Records":
        """Return every rank's bytes, each different one once."""
        records = _Records({own: [range(self.rank, self.rank + 1)]})
        if self.group is None:
            return records
        self.traffic.exchanges += 1
        for bit in self._bits():
            if self.rank & bit:
                self._send_bytes(records.encoded(), self.rank ^ bit)
                break
            if self.rank | bit < self.size:
                records.add(_Records.decoded(self._receive_bytes(self.rank | bit)))
        return _Records.decoded(self._down_bytes(records.encoded() if self.rank == 0 else b""))

    # ---- the trees ------------------------------------------------------------------------------

    def _bits(self) -> list[int]:
        """Return 1, 2, 4, ... below the number of ranks."""
        return [1 << i for i in range((self.size - 1).bit_length())]

    def _reduce(self, tensor: Tensor, num_sums: int) -> None:
        """Combine a contiguous tensor over all ranks: sums first, then maxima."""
        self.traffic.exchanges += 1
        flat = tensor.view(-1)
        for bit in self._bits():
            if self.rank & bit:
                self._send(flat, self.rank ^ bit)
                break
            if self.rank | bit < self.size:
                other = torch.empty_like(flat)
                self._receive(other, self.rank | bit)
                if num_sums == flat.numel():  # a vote: each operation counts
                    flat += other
                else:
                    flat[:num_sums] += other[:num_sums]
                    torch.maximum(flat[num_sums:], other[num_sums:], out=flat[num_sums:])
        self._down(flat)

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
            # As dist.send and dist.recv do, whose checks take as long as the message.
            how([tensor], rank, 0).wait()
        except RuntimeError as error:
            waited_s = time.monotonic() - begin
            lost = self._lost(rank, waited_s)
            text = f"rank {lost} has ended, or did not answer for {waited_s:.0f} s"
            if self.traffic.exchanges == 1:
                text += "; if it runs without --snip, start all ranks with the same flags"
            logger.error("snip: rank %d ends: %s", self.rank, text)
            raise LostRankError(f"{text} ({one_line(error)})") from error

    def _lost(self, rank: int, waited_s: float) -> int:
        """Return the rank that is lost: this rank waited for `rank`, which may wait for another.

        Each rank that gives up notes in the job's store for which one it waited. A rank that has
        ended left its note before; one that waits as well gives up at about the same time.
        """
        in_time = self._timeout is not None and waited_s < 0.9 * self._timeout.total_seconds()
        deadline = time.monotonic() + (0.0 if in_time else _NOTE_S)
        # A rank that gives up ends, so it leaves one note, in whichever exchange it was.
        assert self.group is not None
        prefix = f"snip/lost/{self.group.group_name}"
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{prefix}/{self.rank}", str(rank))
            seen = {self.rank}
            while rank not in seen:
                seen.add(rank)
                key = f"{prefix}/{rank}"
                while not store.check([key]):
                    if time.monotonic() > deadline:
                        return rank
                    time.sleep(0.05)
                rank = int(store.get(key))
        except (RuntimeError, ValueError):  # the rank that had the store has ended
            pass
        return rank


@dataclass
class _Records:
    """Bytes of several ranks, each different record once, with the runs of its ranks.

    Attributes:
        runs: by record. A dict compares by hash first.
    """

    runs: dict[bytes, list[range]]

    def add(self, later: "_Records") -> None:
        """Add the records of ranks that come after all ranks of these."""
        for record, theirs in later.runs.items():
            own = self.runs.setdefault(record, [])
            if own and own[-1].stop == theirs[0].start:
                own[-1] = range(own[-1].start, theirs[0].stop)
                theirs = theirs[1:]
            own += theirs

    def encoded(self) -> bytes:
        """Return them as one record: a line of JSON with lengths and ranks, and then the bytes."""
        runs = [[[run.start, run.stop] for run in ranks] for ranks in self.runs.values()]
        head = json.dumps([list(map(len, self.runs)), runs], separators=(",", ":"))
        return head.encode() + b"\n" + b"".join(self.runs)

    @classmethod
    def decoded(cls, data: bytes) -> "_Records":
        """Return what `encoded` was given."""
        head, _, rest = data.partition(b"\n")
        found: dict[bytes, list[range]] = {}
        at = 0
        for length, runs in zip(*json.loads(head), strict=True):
            found[rest[at : at + length]] = [range(start, stop) for start, stop in runs]
            at += length
        return cls(found)


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's exchanges; None where its backend keeps none."""
    try:
        backend = group._get_backend(group._device_types[0])
    except RuntimeError:  # a backend that is not made before it is used
        return None
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def sum_over(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """All ranks of `group`: add `tensor` up in place and return it; identity for None."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_together(tensors: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """All ranks of `group`: return the sum of each of the tensors over it, in one exchange."""
    flat = sum_over(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
    sums = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [total.view_as(tensor) for total, tensor in zip(sums, tensors, strict=True)]


def ranks_text(ranks: Sequence[range]) -> str:
    """Return `rank 3`, or `ranks 0-511, 700 and 2 more`; what is more are ranks, not runs."""
    names = [
        str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}"
        for run in ranks[:MOST_SHOWN]
    ]
    is_one = sum(map(len, ranks)) == 1
    num_more = sum(map(len, ranks[MOST_SHOWN:]))
    more = f" and {num_more} more" if num_more else ""
    return f"{'rank' if is_one else 'ranks'} {', '.join(names)}{more}"


def _encoded(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
