"""StepMetrics: what the seams learn of a training step, put together for the reports.

Every rank knows the gradient norm, the learning rate and the time. Losses are known to the last
rank only (Megatron reduces them over data ranks on the last pipeline stage) and are fetched to the
device's host, which waits for the device; so they are told to all ranks at Megatron's own log
interval and after evaluations, and not in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip.topology import Topology


class StepMetrics:
    """Collects one step's metrics; the seams write, `finish` reads and clears."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._begin = time.perf_counter()
        self._seconds = 0.0
        self._loss: Any = None
        self._grad_norm: Any = None
        self._validation_loss: Any = None
        self._evaluated = False

    def begin(self) -> None:
        """A training step begins."""
        self._begin = time.perf_counter()

    def trained(self, losses: Any, grad_norm: Any) -> None:
        """A training step has ended.

        Args:
            losses: {name: loss} as Megatron logs it; empty where it is not known.
            grad_norm: global, before clipping, or None.
        """
        self._seconds = time.perf_counter() - self._begin
        self._loss = _first(losses)
        self._grad_norm = grad_norm

    def evaluated(self, losses: Any) -> None:
        """An evaluation has ended; `losses` as in `trained`."""
        self._evaluated = True
        self._validation_loss = _first(losses)

    def finish(self, lr: float | None, tokens: int, log_losses: bool) -> dict[str, Any]:
        """All ranks: return the step's metrics, and be ready for the next step.

        Args:
            lr: learning rate, where there is an optimizer.
            tokens: tokens of the global batch.
            log_losses: the loss is wanted; the same on all ranks.

        Returns:
            grad_norm, lr, tokens_per_s, and where they are due loss and validation_loss.
        """
        values: dict[str, Any] = {}
        if log_losses or self._evaluated:
            loss, validation = self._shared(self._loss, self._validation_loss)
            values |= {"loss": loss} if log_losses else {}
            values |= {"validation_loss": validation} if self._evaluated else {}
        if self._grad_norm is not None:
            values["grad_norm"] = float(self._grad_norm)
        if lr is not None:
            values["lr"] = lr
        if self._seconds > 0.0:
            values["tokens_per_s"] = tokens / self._seconds
        self._loss = self._grad_norm = self._validation_loss = None
        self._evaluated = False
        return values

    def _shared(self, *values: Any) -> tuple[float, ...]:
        """All ranks: return the last rank's values; NaN for None."""
        numbers = torch.tensor(
            [math.nan if value is None else float(value) for value in values], dtype=torch.float64
        )
        group = self._topology.control
        if group is not None:
            dist.broadcast(numbers, src=self._topology.world_size - 1, group=group)
        return tuple(numbers.tolist())


def _first(losses: Any) -> Any:
    """The first loss of {name: loss}; Megatron's training loss comes first."""
    if isinstance(losses, Mapping) and losses:
        return next(iter(losses.values()))
    return None
