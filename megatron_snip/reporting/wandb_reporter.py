"""WandbReporter: a W&B run of our own, for training without Megatron's loop.

Offline unless WANDB_MODE says otherwise, so nothing leaves the machine unasked. W&B keeps a row
until a later step is logged and writes its file every 15 s by default; both would lose the end of
a killed run, so the file is flushed twice a second and our own files hold every plan as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_snip.errors import UsageError
from megatron_snip.reporting.step_report import StepReporter
from megatron_snip.reporting.wandb_writer import WandbWriter

FLUSH_INTERVAL_S = 0.5
_FLUSH = "x_transaction_log_flush_interval"

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbReporter(StepReporter):
    """Logs to a W&B run that it starts and finishes; on the reporting rank only."""

    def __init__(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        """Start a run.

        Args:
            project: W&B project.
            directory: where W&B puts its files (`wandb/` below it).
            config: shown as the run's config.

        Raises:
            UsageError: if wandb is not installed, or WANDB_MODE is not one of its modes.
        """
        try:
            import wandb
        except ImportError:
            raise UsageError(
                "wandb was asked for but is not installed; pip install 'megatron-snip[wandb]'"
            ) from None
        self._run: Any = wandb.init(
            project=project,
            dir=directory,
            config=config,
            mode=_mode(),
            settings=wandb.Settings(silent=True, **_prompt(wandb)),
        )
        super().__init__([WandbWriter(wandb)])

    def close(self) -> None:
        """Finish the run, as failed if an exception is under way; nothing is logged after."""
        super().close()
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if sys.exception() is None else 1)


def _prompt(wandb: Any) -> dict[str, float]:
    """Return the setting that has the file flushed often; W&B before 0.31 has none."""
    known = getattr(wandb.Settings, "model_fields", {})
    return {_FLUSH: FLUSH_INTERVAL_S} if _FLUSH in known else {}


def _mode() -> Mode:
    """Return WANDB_MODE, or offline where it is not set.

    Raises:
        UsageError: if it is set to something that W&B does not know.
    """
    asked = os.environ.get("WANDB_MODE", "offline")
    for mode in get_args(Mode):
        if mode == asked:
            return mode  # type: ignore[no-any-return]
    raise UsageError(f"WANDB_MODE is '{asked}'; expected one of {', '.join(get_args(Mode))}")
