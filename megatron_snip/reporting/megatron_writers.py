"""Megatron's own W&B run and TensorBoard writer, which live on the last rank.

Steps are Megatron's iterations, counted from 1: training step `s` is iteration s + 1, so SNIP's
scalars stand beside Megatron's of the same iteration, which W&B merges into one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_snip.reporting.reporter import Applied, Event, Refresh
from megatron_snip.reporting.scalars import StepScalars

REPEATED = ("loss", "grad_norm", "lr", "validation_loss")
"""Of a step's metrics: what Megatron logs itself."""


class MegatronWriters:
    """Logs scalars through the writers that Megatron has made.

    Args:
        tensorboard: `torch.utils.tensorboard.SummaryWriter`, or None.
        wandb: the `wandb` module with a run under way, or None.
        config: SNIP's settings, shown in the W&B run's config.
        interval: iterations between two rows (Megatron's own interval); a step with news has a
            row whatever the interval.
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
        self._scalars = StepScalars()
        self._news = False
        if wandb is not None:
            wandb.config.update({"snip": dict(config)}, allow_val_change=True)

    def refreshed(self, refresh: Refresh) -> None:
        """Note it for the step's row."""
        self._scalars.refreshed(refresh)
        self._news = True

    def planned(self, applied: Applied) -> None:
        """Note it for the step's row."""
        self._scalars.planned(applied)
        self._news = True

    def event(self, event: Event) -> None:
        """Note it for the step's row."""
        self._scalars.event(event)
        self._news = True

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Log the step's row, where one is due, without what Megatron logs itself."""
        iteration = step + 1
        if not self._news and iteration % self._interval != 0:
            return
        own = {name: value for name, value in values.items() if name not in REPEATED}
        row = self._scalars.take(own)
        self._news = False
        if self._tensorboard is not None:
            for name, value in row.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(row, step=iteration)

    def close(self) -> None:
        """Nothing: Megatron closes its writers itself."""
