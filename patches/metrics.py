"""One iteration's metrics in a loop of Megatron's, on every rank alike.

Only ranks of the last pipeline stage have losses, and reading one waits for the device. So the last
rank broadcasts them, where the loop logs them and after evaluations.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_snip.topology import Topology


class StepMetrics:
    """Collects one iteration's metrics; `finish` returns and clears them."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._seconds = 0.0
        self._losses: dict[str, Any] = {}
        self._grad_norm: Any = None

    def trained(self, seconds: float, losses: Any, grad_norm: Any) -> None:
        """Record a training step.

        Args:
            seconds: seconds that the step took; 0 if later steps will take another time.
            losses: {name: loss} as Megatron logs it; empty where it is not known.
            grad_norm: norm of all gradients before clipping, or None.
        """
        self._seconds = seconds
        self._losses["loss"] = _first(losses)
        self._grad_norm = grad_norm

    def evaluated(self, losses: Any, name: str) -> None:
        """Record the evaluation called `name`; `losses` as in `trained`."""
        self._losses[f"{name}_loss"] = _first(losses)

    def finish(self, lr: float | None, tokens: int, log_losses: bool) -> dict[str, Any]:
        """All ranks: return the iteration's metrics and clear them.

        Args:
            lr: learning rate, or None on a rank without an optimizer.
            tokens: tokens of the global batch.
            log_losses: whether to report the loss; the same on all ranks.

        Returns:
            grad_norm, lr, tokens_per_s, step_s; loss with `log_losses`; <name>_loss after an
            evaluation. A loss that the last rank does not have is NaN.
        """
        names = [name for name in self._losses if log_losses or name != "loss"]
        values: dict[str, Any] = dict(zip(names, self._from_last_rank(names), strict=True))
        if self._grad_norm is not None:
            values["grad_norm"] = float(self._grad_norm)
        if lr is not None:
            values["lr"] = lr
        if self._seconds > 0.0:
            values |= {"tokens_per_s": tokens / self._seconds, "step_s": self._seconds}
        self._seconds = 0.0
        self._losses = {}
        self._grad_norm = None
        return values

    def _from_last_rank(self, names: Sequence[str]) -> list[float]:
        """All ranks: return the last rank's losses; NaN for one that it does not have."""
        known = [self._losses[name] for name in names]
        numbers = torch.tensor(
            [math.nan if v is None else float(v) for v in known], dtype=torch.float64
        )
        if names:
            self._topology.control.broadcast_(numbers, self._topology.world_size - 1)
        found: list[float] = numbers.tolist()
        return found


def _first(losses: Any) -> Any:
    """Return the first loss of {name: loss}; Megatron's training loss comes first."""
    return next(iter(losses.values()), None) if isinstance(losses, Mapping) else None
