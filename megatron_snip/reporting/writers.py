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

import io
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
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.events import Event, Measurement, Metrics, Notice, Payload, PlanApplied
from megatron_snip.reporting.run_record import parse_divergences
from megatron_snip.reporting.scalars import ScalarSeries
from megatron_snip.statistics.health_table import FINDING_COLUMNS

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

    @abstractmethod
    def _show(self, config: dict[str, Any]) -> None: ...


class TensorBoardWriter(_Dashboard):
    """Writes through a `torch.utils.tensorboard.SummaryWriter`."""

    def _show(self, config: dict[str, Any]) -> None:
        self._add_text("snip/config", yaml.safe_dump(config, sort_keys=False), 0)

    def write(self, event: Event) -> None:
        """Write an event."""
        import numpy as np

        iteration, payload, board = event.iteration, event.payload, self._board
        values = self._scalars.values(event)
        if isinstance(payload, Metrics) and iteration % self._interval:
            return
        for name, value in values.items():
            board.add_scalar(name, value, iteration)
        for name, picture in pictures(payload).items():
            pixels = np.asarray(_opened(picture).convert("RGB"))
            board.add_image(name, pixels, iteration, dataformats="HWC")
        if isinstance(payload, Measurement) and payload.health is not None:
            rows = (FINDING_COLUMNS, *payload.health.worst())
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

    def write(self, event: Event) -> None:
        """Log an event, in the row of its iteration."""
        run, iteration, payload = self._board.run, event.iteration, event.payload
        row: dict[str, Any] = dict(self._scalars.values(event))
        if run is None or (isinstance(payload, Metrics) and iteration % self._interval):
            return
        if iteration < run.step:
            warn_once(
                logger,
                f"the W&B run is at step {run.step} and training at iteration {iteration}: "
                "iterations that the W&B run has already are left out",
            )
            return
        for name, picture in pictures(payload).items():
            row[name] = self._board.Image(_opened(picture))
        if isinstance(payload, Measurement) and payload.health is not None:
            links = {name.removesuffix("/worst"): _panel(run, name) for name in row}
            worst = [
                [*each, links.get(f"snip/health/{each[0]}/{each[2]}", "")]
                for each in payload.health.worst()
            ]
            row["snip/health/worst"] = self._board.Table(
                columns=[*FINDING_COLUMNS, "series"], data=worst
            )
        run.log(row, step=iteration)
        if isinstance(payload, PlanApplied):
            self._log_artifact(run, payload.plan)
        elif isinstance(payload, Notice):
            title = f"SNIP: {payload.kind} at iteration {iteration}"
            run.alert(title=title, text=payload.message, level=self._board.AlertLevel.WARN)

    def close(self) -> None:
        """Leave the run to its maker."""

    def _log_artifact(self, run: Any, plan: PrecisionPlan) -> None:
        metadata = {"iteration": plan.iteration, "digest": plan.digest}
        artifact = self._board.Artifact(f"plan-{run.id}", "snip-plan", metadata=metadata)
        with artifact.new_file(f"{plan.iteration}.json") as stream:
            stream.write(plan.to_json())
        run.log_artifact(artifact)


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
        wandb.init(
            project=project,
            dir=directory,
            config=dict(config),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
    except (wandb.errors.Error, ValueError) as error:
        raise UsageError(f"wandb cannot start (WANDB_MODE is '{mode}'): {error}") from None
    return wandb


def pictures(payload: Payload) -> dict[str, bytes]:
    """Return {name: PNG} of a measurement, or of a plan that is new here; empty without matplotlib.

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
    from megatron_snip.reporting import figures

    if isinstance(payload, Measurement):
        record = parse_divergences(divergences_dict(payload.divergences, payload.statistics))
        found = {}
        if figures.quantized_options(record):
            found["snip/5_fragile_linears"] = figures.png(lambda: figures.divergence_maps(record))
        if (health := payload.health) is not None and health.lowest is not None:
            found["snip/health/maps"] = figures.png(lambda: figures.health_maps([health]))
        return found
    return {"snip/6_plan": figures.png(lambda: figures.plan_map(payload.plan.linears))}


def _panel(run: Any, name: str) -> str:
    """Return the address of a series' panel, or its name: offline, W&B knows no address.

    Source: https://docs.wandb.ai/models/app/features/panels, "Compose a panel's full-screen link".
    """
    project = run.settings.project_url
    query = urlencode({"panelDisplayName": name, "panelSectionName": name.partition("/")[0]})
    return f"{project}?{query}" if project else name


def _opened(picture: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(picture))
