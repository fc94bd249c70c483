"""Megatron's own W&B run and TensorBoard writer, which live on the last rank.

Steps are Megatron's iterations (1-based: the iteration that step `s` is part of is s + 1), so that
SNIP's scalars stand beside Megatron's. W&B merges what is logged for one iteration; it must be told
of a refresh and a plan before that iteration's own log line, and is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_snip.reporting.reporter import Applied, Refresh
from megatron_snip.reporting.scalars import plan_scalars, refresh_scalars, step_scalars

REPEATED = ("loss", "grad_norm", "lr", "validation_loss")
"""Of a step's metrics: what Megatron logs itself."""


class MegatronWriters:
    """Logs scalars through the writers that Megatron has made.

    Args:
        tensorboard: `torch.utils.tensorboard.SummaryWriter`, or None.
        wandb: the `wandb` module with a run under way, or None.
        config: SNIP's settings, shown in the W&B run's config.
        interval: iterations between two reports of training metrics (Megatron's own interval).
    """

    def __init__(
        self,
        tensorboard: Any,
        wandb: Any,
        config: Mapping[str, Any],
        interval: int = 1,
    ) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._interval = max(1, interval)
        if wandb is not None:
            wandb.config.update({"snip": dict(config)}, allow_val_change=True)

    def refreshed(self, refresh: Refresh) -> None:
        """Log the refresh's scalars."""
        self._log(refresh.step, refresh_scalars(refresh))

    def planned(self, applied: Applied) -> None:
        """Log the plan's scalars."""
        self._log(applied.step, plan_scalars(applied))

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Log what Megatron does not log itself, at its interval."""
        if (step + 1) % self._interval == 0:
            own = {name: value for name, value in values.items() if name not in REPEATED}
            self._log(step, step_scalars(own))

    def close(self) -> None:
        """Nothing: Megatron closes its writers itself."""

    def _log(self, step: int, scalars: Mapping[str, float]) -> None:
        iteration = step + 1
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(dict(scalars), step=iteration)
