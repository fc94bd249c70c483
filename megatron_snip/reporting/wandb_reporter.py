"""Weights & Biases: scalars as `snip/<room>/<quantity>_<unit>`, each plan as a table.

Offline unless WANDB_MODE says otherwise, so nothing leaves the machine unasked. W&B keeps a row
until a later step is logged and writes its file every 15 s by default; both would lose the end of
a killed run, so the file is flushed twice a second and our own files hold every plan as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_snip.errors import UsageError
from megatron_snip.reporting.reporter import Applied, Refresh

FLUSH_INTERVAL_S = 0.5

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbReporter:
    """Logs to a W&B run that it starts and finishes; on the reporting rank only."""

    def __init__(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        """Start a run.

        Args:
            project: W&B project.
            directory: where W&B puts its files (`wandb/` below it).
            config: shown as the run's config.

        Raises:
            UsageError: if wandb is not installed.
        """
        try:
            import wandb
        except ImportError:
            raise UsageError(
                "wandb was asked for but is not installed; pip install 'megatron-snip[wandb]'"
            ) from None
        self._wandb = wandb
        self._pending: dict[str, Any] = {}
        self._run = wandb.init(
            project=project,
            dir=directory,
            config=config,
            mode=_mode(),
            settings=wandb.Settings(silent=True, x_transaction_log_flush_interval=FLUSH_INTERVAL_S),
        )

    def refreshed(self, refresh: Refresh) -> None:
        """Add totals of both divergences and the measurement's time to the step's row."""
        linears = refresh.statistics.linears
        self._pending |= {
            "snip/statistics/refresh_s": refresh.seconds,
            "snip/statistics/num_linears": len(linears),
        }
        lowest = [list(linear.options.values())[-1] for linear in refresh.divergences.linears]
        self._pending |= {
            "snip/divergence/loss_total": sum(d.loss_divergence for d in lowest),
            "snip/divergence/weight_total": sum(d.weight_divergence for d in lowest),
        }

    def planned(self, applied: Applied) -> None:
        """Add the plan's numbers and its table to the step's row."""
        plan = applied.plan
        table = self._wandb.Table(columns=["linear", "fprop", "dgrad", "wgrad"])
        for name, option in plan.linears.items():
            table.add_data(name, *option.formats)
        self._pending |= {
            "snip/planning/objective": plan.objective,
            "snip/planning/bound": plan.bound,
            "snip/planning/efficiency": plan.efficiency,
            "snip/planning/solve_s": plan.seconds,
            "snip/planning/wait_s": applied.waited_s,
            "snip/planning/changed_linears": applied.num_changed,
            "snip/planning/plan": table,
        }

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Log the step's row."""
        row = {f"train/{name}": value for name, value in values.items()}
        row["snip/linears/lowest_precision_fraction"] = row.pop("train/lowest_precision_fraction")
        self._run.log({**row, **self._pending}, step=step)
        self._pending = {}

    def close(self) -> None:
        """Finish the run; nothing is logged after."""
        self._run.finish()


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
