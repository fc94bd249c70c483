"""Megatron's own W&B run and TensorBoard writer, which live on the last rank.

Steps are Megatron's iterations (1-based: the iteration that step `s` is part of is s + 1), so that
SNIP's numbers stand beside Megatron's. A step is reported at its end, after Megatron has logged the
same iteration; W&B merges the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_snip.reporting.step_report import StepReporter, StepWriter
from megatron_snip.reporting.tensorboard_reporter import TensorBoardWriter
from megatron_snip.reporting.wandb_writer import WandbWriter

REPEATED = ("loss", "grad_norm", "lr", "validation_loss")
"""Of a step's metrics: what Megatron logs itself."""


class MegatronWriters(StepReporter):
    """Logs through the writers that Megatron has made, and closes itself."""

    def __init__(
        self,
        tensorboard: Any,
        wandb: Any,
        config: Mapping[str, Any],
        interval: int = 1,
    ) -> None:
        """Take over the writers.

        Args:
            tensorboard: `torch.utils.tensorboard.SummaryWriter`, or None.
            wandb: the `wandb` module with a run under way, or None.
            config: SNIP's settings, shown in the W&B run's config and as text in TensorBoard.
            interval: iterations between two reports of training metrics (Megatron's own interval).
        """
        writers: list[StepWriter] = []
        if tensorboard is not None:
            writers.append(TensorBoardWriter(tensorboard, config))
        if wandb is not None:
            wandb.config.update({"snip": dict(config)}, allow_val_change=True)
            writers.append(WandbWriter(wandb))
        super().__init__(writers, offset=1, interval=interval, leave_out=REPEATED)
