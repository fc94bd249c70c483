"""Writers for TensorBoard and Weights & Biases.

    metrics          scalars, every `interval` iterations
    a measurement    scalars, histograms and heat maps of the divergences
    a plan           scalars; a table and a picture where it changed; in W&B the file as an artifact
    a notice         text in TensorBoard, an alert in W&B

Under Megatron the writers of the last rank are used, and metrics that Megatron logs itself are
left out. Pictures need matplotlib (`pip install 'megatron-snip[report]'`); without it they are
left out with one warning.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from megatron_snip.divergence.quality_loss import divergences_dict
from megatron_snip.errors import UsageError
from megatron_snip.log import warn_once
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.events import Event, Measurement, Metrics, Notice, PlanApplied
from megatron_snip.reporting.run_record import parse_divergences
from megatron_snip.reporting.scalars import ScalarSeries, divergence_values

logger = logging.getLogger(__name__)

MEGATRON_LOGS = frozenset({"loss", "grad_norm", "lr", "validation_loss"})
"""Metrics that Megatron logs itself."""

PLAN_COLUMNS = ("linear", "fprop", "dgrad", "wgrad")


class TensorBoardWriter:
    """Writes through a `torch.utils.tensorboard.SummaryWriter`, which its maker closes."""

    def __init__(
        self,
        writer: Any,
        config: Mapping[str, Any],
        interval: int = 1,
        left_out: Collection[str] = (),
    ) -> None:
        """Show `config` (plain values) as text; write metrics every `interval` iterations."""
        self._writer = writer
        self._interval = max(1, interval)
        self._scalars = ScalarSeries(config, left_out)
        self._add_text("snip/config", yaml.safe_dump(dict(config), sort_keys=False), 0)

    def write(self, event: Event) -> None:
        """Write an event."""
        iteration, payload = event.iteration, event.payload
        values = self._scalars.values(event)
        if isinstance(payload, Metrics) and iteration % self._interval:
            return
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        match payload:
            case Measurement() as measured:
                self._add_divergences(measured, iteration)
            case PlanApplied() as applied if applied.num_changed or applied.resumed:
                rows = [PLAN_COLUMNS, tuple("---" for _ in PLAN_COLUMNS), *plan_rows(applied.plan)]
                table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
                self._writer.add_text("snip/plan/table", table, iteration)
                self._add_picture("snip/plan/map", plan_picture(applied.plan), iteration)
            case Notice(kind, message):
                self._add_text("snip/notices", f"{kind}: {message}", iteration)
        if not isinstance(payload, Metrics):
            self._writer.flush()

    def close(self) -> None:
        """Put on disk what was written."""
        self._writer.flush()

    def _add_divergences(self, measured: Measurement, iteration: int) -> None:
        import numpy as np

        for name, values in divergence_values(measured.divergences).items():
            if values:
                self._writer.add_histogram(name, np.array(values), iteration)
        self._add_picture("snip/divergence/maps", divergence_picture(measured), iteration)

    def _add_picture(self, name: str, picture: bytes | None, iteration: int) -> None:
        if picture is None:
            return
        import numpy as np
        from PIL import Image

        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))  # [height, width, rgb]
        self._writer.add_image(name, pixels, iteration, dataformats="HWC")

    def _add_text(self, name: str, text: str, iteration: int) -> None:
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # shown unchanged
        self._writer.add_text(name, indented, iteration)


class WandbWriter:
    """Logs to the W&B run that is active.

    W&B refuses rows of earlier steps. A W&B run that continues after training went back to a
    checkpoint has those rows already; they are left out, with one warning.
    """

    def __init__(
        self,
        wandb: Any,
        config: Mapping[str, Any],
        interval: int = 1,
        left_out: Collection[str] = (),
    ) -> None:
        """Use the module `wandb`; show `config` (plain values) in the run's config as `snip`."""
        self._wandb = wandb
        self._interval = max(1, interval)
        self._scalars = ScalarSeries(config, left_out)
        wandb.config.update({"snip": dict(config)}, allow_val_change=True)

    def write(self, event: Event) -> None:
        """Log an event, in the row of its iteration."""
        run, iteration, payload = self._wandb.run, event.iteration, event.payload
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
        match payload:
            case Measurement() as measured:
                row |= self._divergences(measured)
            case PlanApplied() as applied if applied.num_changed or applied.resumed:
                row |= self._plan(applied.plan)
        run.log(row, step=iteration)
        if isinstance(payload, PlanApplied):
            self._log_artifact(run, payload.plan)
        elif isinstance(payload, Notice):
            title = f"SNIP: {payload.kind} at iteration {iteration}"
            run.alert(title=title, text=payload.message, level=self._wandb.AlertLevel.WARN)

    def close(self) -> None:
        """Leave the run to its maker."""

    def _divergences(self, measured: Measurement) -> dict[str, Any]:
        row = {
            name: self._wandb.Histogram(values)
            for name, values in divergence_values(measured.divergences).items()
            if values
        }
        return row | self._image("snip/divergence/maps", divergence_picture(measured))

    def _plan(self, plan: PrecisionPlan) -> dict[str, Any]:
        rows = [list(row) for row in plan_rows(plan)]
        table = self._wandb.Table(columns=list(PLAN_COLUMNS), data=rows)
        return {"snip/plan/table": table, **self._image("snip/plan/map", plan_picture(plan))}

    def _image(self, name: str, picture: bytes | None) -> dict[str, Any]:
        if picture is None:
            return {}
        from PIL import Image

        return {name: self._wandb.Image(Image.open(io.BytesIO(picture)))}

    def _log_artifact(self, run: Any, plan: PrecisionPlan) -> None:
        metadata = {"iteration": plan.iteration, "digest": plan.digest}
        artifact = self._wandb.Artifact(f"plan-{run.id}", "snip-plan", metadata=metadata)
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
    # W&B writes its file every 15 s; a killed run would lose that much.
    flush = "x_transaction_log_flush_interval"
    known = getattr(wandb.Settings, "model_fields", {})
    settings = wandb.Settings(silent=True, **({flush: 0.5} if flush in known else {}))
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    try:
        wandb.init(
            project=project, dir=directory, config=dict(config), mode=mode, settings=settings
        )
    except (wandb.errors.Error, ValueError) as error:
        raise UsageError(f"wandb cannot start (WANDB_MODE is '{mode}'): {error}") from None
    return wandb


def plan_rows(plan: PrecisionPlan) -> list[tuple[str, str, str, str]]:
    """Return one row per linear, as `PLAN_COLUMNS` names them."""
    return [(name, *option.formats) for name, option in plan.linears.items()]


def plan_picture(plan: PrecisionPlan) -> bytes | None:
    """Return a plan as PNG, or None without matplotlib."""
    if not _can_draw():
        return None
    from megatron_snip.reporting.figures import plan_map, png

    return png(lambda: plan_map(plan.linears))


def divergence_picture(measured: Measurement) -> bytes | None:
    """Return a refresh's divergences as PNG; None without matplotlib or a quantized option."""
    record = parse_divergences(divergences_dict(measured.divergences, measured.statistics))
    if not _can_draw() or all(option == "bf16" for option in record.uniform_options):
        return None
    from megatron_snip.reporting.figures import divergence_maps, png

    return png(lambda: divergence_maps(record))


def _can_draw() -> bool:
    if find_spec("matplotlib") is not None:
        return True
    warn_once(logger, "no pictures are logged: pip install 'megatron-snip[report]' for matplotlib")
    return False
