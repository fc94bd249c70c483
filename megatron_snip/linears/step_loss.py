"""The loss of a training step, on all ranks, and whether its gradients are finite.

The schedule gives a loss to the last pipeline stage alone, for its own data. It is summed over
data ranks there,

    loss = sum over microbatches and data ranks of (sum of token losses)
           / sum over the same of (number of tokens)

and the last rank of all, which is of the last stage in every layout of Megatron's, broadcasts it.
So all ranks hold the same bits and decide alike. Megatron's older form of a report, a mean without
a number of tokens, counts as one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_snip.collectives import any_rank, sum_over
from megatron_snip.topology import Topology


class StepLoss:
    """The loss of a step that has run; made on all ranks together, in the same order.

    Making it does not wait for the device; `value` does.
    """

    def __init__(self, results: list[dict[str, Any]], topology: Topology) -> None:
        """Start the sum.

        Args:
            results: what the schedule returned on this rank.
            topology: this rank's place.
        """
        self._topology = topology
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._copied: torch.cuda.Event | None = None
        losses = microbatch_losses(results)
        if losses is None:
            return
        sums = losses.sum(dim=0)
        sum_over(sums, topology.data.group)
        self._sums = sums.to("cpu", non_blocking=True)
        if sums.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def value(self) -> float | None:
        """All ranks: return the loss, the same everywhere; None if the schedule reports none."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._topology.control is not None:
            last = self._topology.world_size - 1
            dist.broadcast(self._sums, src=last, group=self._topology.control)
        total, count = self._sums.tolist()
        return None if count == 0.0 else float(total / count)


def finite_gradients(chunks: Sequence[torch.nn.Module], topology: Topology) -> bool:
    """All ranks: return whether every gradient of every rank is finite.

    With FP16 the answer is True: there an overflow is the loss scaler's job.
    """
    return not any_rank(not _finite_here(chunks), topology.control)


@torch.no_grad()
def _finite_here(chunks: Sequence[torch.nn.Module]) -> bool:
    if get_model_config(chunks[0]).fp16:
        return True
    grads = [
        grad
        for chunk in chunks
        for parameter in chunk.parameters()
        if (grad := getattr(parameter, "main_grad", None)) is not None
        or (grad := parameter.grad) is not None
    ]
    if not grads:
        return True
    largest = torch.stack([torch.linalg.vector_norm(g, ord=math.inf).float() for g in grads])
    return bool(torch.isfinite(largest).all())


def microbatch_losses(results: list[dict[str, Any]]) -> torch.Tensor | None:
    """Return the sum of token losses and the number of tokens of each microbatch.

    Args:
        results: what the schedule returned on this rank.

    Returns:
        FP64 [microbatches, 2] on the device; None where the schedule reports no loss.
    """
    reports = [next(iter(r.values())) for r in results if isinstance(r, dict) and r]
    return torch.stack([_loss_and_tokens(report) for report in reports]) if reports else None


def _loss_and_tokens(reported: Any) -> torch.Tensor:
    """Return one microbatch's [2] FP64 on the device: sum of losses, number of tokens."""
    flat = torch.as_tensor(reported).detach().double().reshape(-1)
    return flat if flat.numel() == 2 else torch.stack([flat[0], torch.ones_like(flat[0])])
