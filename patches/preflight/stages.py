"""Pipeline stages of a job as ranks of one process: what ranks do together, each stage does here.

The code of a job exchanges records between its ranks (`collectives.Control`). Here each stage is a
thread, and what it sends is put into a queue.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ProcessGroup

from megatron_snip.collectives import Control
from megatron_snip.topology import Topology

T = TypeVar("T")

_POLL_S = 0.05


@dataclass(frozen=True)
class Stage:
    """What one rank of each pipeline stage holds.

    Attributes:
        chunks: its model chunks, on the meta device.
        topology: its place; `control` exchanges with the other stages, by `group`.
        group: what it exchanges by.
    """

    chunks: list[torch.nn.Module]
    topology: Topology
    group: "ThreadGroup"


def groups_of(size: int) -> list["ThreadGroup"]:
    """Return what each of `size` ranks exchanges by that are threads of this process."""
    mail = {(a, b): SimpleQueue[torch.Tensor]() for a in range(size) for b in range(size)}
    ended = [threading.Event() for _ in range(size)]
    return [ThreadGroup(rank, mail, ended) for rank in range(size)]


def on_all(stages: Sequence[Stage], action: Callable[[Stage], T]) -> list[T]:
    """Run `action` on every stage at the same time; return the results in order.

    Raises:
        Exception: the first that a stage raised by itself.
    """
    results: list[Any] = [None] * len(stages)
    errors: list[Exception] = []
    for stage in stages:
        stage.group.begin()

    def run(index: int) -> None:
        try:
            results[index] = action(stages[index])
        except Exception as error:
            errors.append(error)
            stages[index].group.end()  # else the others would wait for it

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class ThreadGroup:
    """What `Control` uses of a process group, between threads."""

    group_name = "preflight"
    _device_types = ("cpu",)

    def __init__(
        self,
        rank: int,
        mail: dict[tuple[int, int], "SimpleQueue[torch.Tensor]"],
        ended: list[threading.Event],
    ) -> None:
        self._rank = rank
        self._mail = mail
        self._ended = ended  # whether each rank sends nothing more

    @property
    def control(self) -> Control:
        """The control plane of this rank."""
        return Control(cast(ProcessGroup, self))

    def begin(self) -> None:
        """Expect messages of this rank, and drop unread messages to it."""
        for (_, receiver), messages in self._mail.items():
            while receiver == self._rank and not messages.empty():
                messages.get()
        self._ended[self._rank].clear()

    def end(self) -> None:
        """This rank sends nothing more."""
        self._ended[self._rank].set()

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ended)

    def _get_backend(self, device: Any) -> Any:
        raise RuntimeError("threads have no timeout")

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "ThreadGroup":
        """Send a tensor to a rank."""
        self._mail[self._rank, rank].put(tensors[0].clone())
        return self

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "ThreadGroup":
        """Fill a tensor with the next one of a rank.

        Raises:
            RuntimeError: if that rank has ended.
        """
        while True:
            try:
                tensors[0].copy_(self._mail[rank, self._rank].get(timeout=_POLL_S))
                return self
            except Empty:
                if self._ended[rank].is_set() and self._mail[rank, self._rank].empty():
                    raise RuntimeError(f"stage {rank} has ended") from None

    def wait(self) -> None:
        """All is done when `send` or `recv` returns."""
