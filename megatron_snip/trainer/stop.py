"""StopRequests: SIGTERM and SIGUSR1 as a wish that all ranks hear of at the end of a step.

Schedulers send one of them some time before they take the machines away. A signal may reach one
rank or all, and each at another moment, so the ranks agree after every step.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Within its context these signals are remembered and do nothing else."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """`group` holds all ranks and carries CPU tensors; None without other ranks."""
        self._group = group
        self._heard = 0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def agreed(self) -> str | None:
        """All ranks: return the name of a signal that any rank has received, or None."""
        heard = torch.tensor([self._heard], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=self._group)
        number = int(heard.item())
        return signal.Signals(number).name if number else None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = number
