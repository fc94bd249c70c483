"""Writers for TensorBoard and Weights & Biases.

    metrics          scalars, every `interval` iterations
    a measurement    scalars and heat maps of divergences and health; the worst linears as a table
    a plan           scalars; a picture where it changed; in W&B the file as an artifact
    a notice         text in TensorBoard, an alert in W&B

Under Megatron the writers of the last rank are used, and metrics that Megatron logs itself are
left out. Pictures need matplotlib (`pip install 'megatron-snip[report]'`); without it they are
left out with one warning.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from megatron_snip.divergence.quality_loss import divergences_dict
from megatron_snip.errors import UsageError
from megatron_snip.log import warn_once
from megatron_snip.reporting.events import Event, Measurement, Metrics, Notice, Payload, PlanApplied
from megatron_snip.reporting.run_record import parse_divergences
from megatron_snip.reporting.scalars import ScalarSeries
from megatron_snip.statistics.health_table import Finding

logger = logging.getLogger(__name__)

MEGATRON_LOGS = frozenset({"loss", "grad_norm", "lr", "validation_loss"})
"""Metrics that Megatron logs itself."""


class _Dashboard(ABC):
    def __init__(
        self,
        board: Any,
        config: Mapping[str, Any],
        interval: int = 1,
        left_out: Collection[str] = (),
    ) -> None:
        """Show `config` (plain values); write metrics every `interval` iterations.

        Args:
            board: a `SummaryWriter`, which its maker closes, or the module `wandb`.
            config: the run's settings.
            interval: see above.
            left_out: training metrics that are not wanted, by their names in `Metrics`.
        """
        self._board = board
        self._interval = max(1, interval)
        self._scalars = ScalarSeries(config, left_out)
        self._show(dict(config))

    def write(self, event: Event) -> None:
        """Write an event."""
        scalars = self._scalars.values(event)
        if not isinstance(event.payload, Metrics) or event.iteration % self._interval == 0:
            self._log(event.iteration, event.payload, scalars)

    @abstractmethod
    def _show(self, config: dict[str, Any]) -> None: ...

    @abstractmethod
    def _log(self, iteration: int, payload: Payload, scalars: dict[str, float]) -> None: ...


class TensorBoardWriter(_Dashboard):
    """Writes through a `torch.utils.tensorboard.SummaryWriter`."""

    def _show(self, config: dict[str, Any]) -> None:
        self._add_text("snip/config", yaml.safe_dump(config, sort_keys=False), 0)

    def _log(self, iteration: int, payload: Payload, scalars: dict[str, float]) -> None:
        board = self._board
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
        for name, picture in pictures(payload).items():
            board.add_figure(name, picture, iteration, close=False)
        if isinstance(payload, Measurement):
            rows = (Finding._fields, *payload.health.worst())
            text = "\n".join("  ".join(map(str, row)) for row in rows)
            self._add_text("snip/health/worst", text, iteration)
        if isinstance(payload, Notice):
            self._add_text("snip/notices", f"{payload.kind}: {payload.message}", iteration)
        if not isinstance(payload, Metrics):
            board.flush()

    def close(self) -> None:
        """Put on disk what was written."""
        self._board.flush()

    def _add_text(self, name: str, text: str, iteration: int) -> None:
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # shown unchanged
        self._board.add_text(name, indented, iteration)


class WandbWriter(_Dashboard):
    """Logs to the W&B run that is active; the settings are in its config as `snip`.

    W&B refuses rows of earlier steps. A W&B run that continues after training went back to a
    checkpoint has those rows already; they are left out, with one warning.
    """

    def _show(self, config: dict[str, Any]) -> None:
        self._board.config.update({"snip": config}, allow_val_change=True)

    def _log(self, iteration: int, payload: Payload, scalars: dict[str, float]) -> None:
        run, row = self._board.run, dict[str, Any](scalars)
        if run is None:
            return
        if iteration < run.step:
            warn_once(
                logger,
                f"the W&B run is at step {run.step} and training at iteration {iteration}: "
                "iterations that the W&B run has already are left out",
            )
            return
        for name, picture in pictures(payload).items():
            row[name] = self._board.Image(picture)
        if isinstance(payload, Measurement):
            links = {name.removesuffix("/worst"): _panel(run, name) for name in row}
            table = self._board.Table(columns=[*Finding._fields, "series"])
            for each in payload.health.worst():
                table.add_data(*each, links.get(f"snip/health/{each.measure}/{each.tensor}", ""))
            row["snip/health/worst"] = table
        run.log(row, step=iteration)
        if isinstance(payload, PlanApplied):
            plan = payload.plan
            metadata = {"iteration": plan.iteration, "digest": plan.digest}
            artifact = self._board.Artifact(f"plan-{run.id}", "snip-plan", metadata=metadata)
            with artifact.new_file(f"{plan.iteration}.json") as stream:
                stream.write(plan.to_json())
            run.log_artifact(artifact)
        elif isinstance(payload, Notice):
            title = f"SNIP: {payload.kind} at iteration {iteration}"
            run.alert(title=title, text=payload.message, level=self._board.AlertLevel.WARN)

    def close(self) -> None:
        """Leave the run to its maker."""


def start_wandb(project: str, directory: Path, config: Mapping[str, Any]) -> Any:
    """Start a W&B run, offline unless WANDB_MODE says otherwise; return the module `wandb`.

    Raises:
        UsageError: if wandb is not installed or cannot start.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError(
            "wandb was requested and is not installed; pip install 'megatron-snip[wandb]'"
        ) from None
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    try:
        quiet = wandb.Settings(silent=True)
        wandb.init(project=project, dir=directory, config=dict(config), mode=mode, settings=quiet)
    except (wandb.errors.Error, ValueError) as error:
        raise UsageError(f"wandb cannot start (WANDB_MODE is '{mode}'): {error}") from None
    return wandb


def pictures(payload: Payload) -> dict[str, Any]:
    """Return {name: figure} of a measurement, or of a plan that is new; empty without matplotlib.

    A plan is new if it changes a linear, or if a resumed run continues with it.
    """
    if not isinstance(payload, PlanApplied | Measurement):
        return {}
    if isinstance(payload, PlanApplied) and not (payload.num_changed or payload.resumed):
        return {}
    if find_spec("matplotlib") is None:
        extra = "pip install 'megatron-snip[report]' for matplotlib"
        warn_once(logger, f"no pictures are logged: {extra}")
        return {}
    import matplotlib.pyplot  # noqa: F401  # with which both dashboards handle figures

    from megatron_snip.reporting import figures

    if isinstance(payload, PlanApplied):
        return {"snip/6_plan": figures.plan_map(payload.plan.linears)}
    record = parse_divergences(divergences_dict(payload.divergences))
    found = {}
    if record.quantized_options:
        found["snip/5_fragile_linears"] = figures.divergence_maps(record)
    if (health := payload.health).lowest is not None:
        found["snip/health/maps"] = figures.health_maps([health])
    return found


def _panel(run: Any, name: str) -> str:
    """Return the address of a series' panel, or its name: offline, W&B knows no address.

    Source: https://docs.wandb.ai/models/app/features/panels, "Compose a panel's full-screen link".
    """
    project = run.settings.project_url
    query = urlencode({"panelDisplayName": name, "panelSectionName": name.partition("/")[0]})
    return f"{project}?{query}" if project else name
