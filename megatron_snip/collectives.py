"""Exchanges between all ranks of a job: sums, JSON records, one decision for all.

`Control` is the control plane. Every rank calls its methods in the same order. Its exchanges go
over trees of ranks (rank_tree.py). Records travel as JSON; nothing is pickled. `sum_over` and
`sum_together` add tensors of the model on the groups of its layout.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_snip.errors import SnipError, UnsupportedError, UsageError
from megatron_snip.log import log_failure
from megatron_snip.rank_tree import RankTree, timeout_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_SHOWN = 3
"""Of different messages of failed ranks, and of runs of ranks with the same one."""

_LAZY = "TORCH_GLOO_LAZY_INIT"


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


class Control:
    """All ranks of a job, for votes, records and small tables on the CPU; or one rank alone.

    All ranks call every method together, in the same order. With one rank every method does what
    that rank alone would: a record still takes the way through JSON.

    Sums are added in a fixed order, and every rank gets rank 0's bits.

    An exchange in which a rank has ended, or does not answer within the group's timeout, raises
    `LostRankError`, which names that rank.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        traffic: what this rank has exchanged.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Make the control plane of a group's ranks, for tensors on the CPU; None: of one rank."""
        self._tree = RankTree(group)
        self.rank = self._tree.rank
        self.size = self._tree.size
        self.traffic = self._tree.traffic

    @classmethod
    def of_all_ranks(cls) -> "Control":
        """All ranks: return a control plane over all ranks of the job.

        It is a gloo group with the timeout of the default group, which Megatron sets by
        `--distributed-timeout-minutes`. Its ranks connect when they first exchange something (with
        torch 2.8 and later).
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        default = dist.distributed_c10d._get_default_group()
        # With this a rank connects only to the few ranks next to it in the trees. torch before 2.8
        # does not know it, and connects every rank to every other one: N^2 connections, which take
        # minutes from 4,000 ranks on.
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
        if self.size == 1:
            return tensor
        if maxima is None:
            total = tensor.contiguous()
            self._tree.reduce(total, total.numel())
            # `contiguous` has made a copy where the tensor was not.
            return tensor.copy_(total) if total is not tensor else tensor
        both = torch.cat([tensor.reshape(-1).double(), maxima.reshape(-1).double()])
        self._tree.reduce(both, tensor.numel())
        # One tensor, one exchange: the tree adds up to `numel` numbers and takes maxima of the
        # rest.
        sums, largest = torch.split(both, [tensor.numel(), maxima.numel()])
        maxima.copy_(largest.view_as(maxima))
        return tensor.copy_(sums.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank."""
        return int(self.sum_(torch.tensor([int(flag)], dtype=torch.int32)).item()) > 0

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Fill `tensor`, on the CPU, with that of rank `source`, and return it."""
        self._tree.broadcast(tensor, source)
        return tensor

    # ---- records --------------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` (others pass anything).

        Raises:
            TypeError: on rank 0, if `value` is not JSON.
        """
        record = _encoded(value) if self.rank == 0 else b""
        return json.loads(self._tree.broadcast_bytes(record))

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
        cause = None
        if self.rank == 0:
            try:
                found = {"result": action()}
                _encoded(found)  # what cannot be sent is an error here
            except UsageError as error:
                found = {"message": error.message, "field": error.field}
            except Exception as error:  # any error must reach all ranks
                found = {"failure": log_failure(logger, what, error)}
                cause = error
        found = self.broadcast(found)
        if "message" in found:
            raise UsageError(found["message"], found["field"])
        if "failure" in found:
            raise RemoteFailure(what, {found["failure"]: [range(1)]}) from cause
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
        cause = None
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
                cause = error
        records = self._tree.gather_bytes(own)
        values = [json.loads(record) for record in records.ranges]
        ranks = [tuple(ranges) for ranges in records.ranges.values()]
        failures: dict[str, Sequence[range]] = {}
        refused: dict[str, None] = {}
        for value, runs in zip(values, ranks, strict=True):
            if "failure" in value:
                failures[value["failure"]] = runs
            refused |= dict.fromkeys(value.get("refusals", ()))
        # All ranks have the same records, so all raise the same. A failure comes first: what that
        # rank would have refused is not known.
        if failures:
            raise RemoteFailure(what, failures) from cause
        if refused:
            raise UnsupportedError(*refused)
        for value in values:
            if "message" in value:
                raise UsageError(value["message"], value["field"])
        found = Gathered(tuple(value["result"] for value in values), tuple(ranks))
        return result, found  # type: ignore[return-value]  # no rank failed


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


def runs_of(ranks: Sequence[int]) -> list[range]:
    """Return ranks in ascending order as runs."""
    runs: list[range] = []
    for rank in ranks:
        if runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs


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
