"""Writers for TensorBoard and Weights & Biases; scalars.py has the scalars that both show.

    metrics          scalars, every `interval` iterations
    a measurement    scalars and heat maps of divergences and health; the worst linears as a table
    a plan           scalars; what linears run under it; a picture where it changed; in W&B the file
                     as an artifact
    a notice         text in TensorBoard, an alert in W&B

Under Megatron the writers of the last rank are used, and metrics that Megatron logs itself are
left out. Pictures need matplotlib (`pip install 'megatron-snip[report]'`); without it they are
left out with one warning.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from megatron_snip.divergence.quality_loss import divergences_dict
from megatron_snip.errors import SnipError, UsageError, one_line
from megatron_snip.log import log_failure, warn_once
from megatron_snip.output import yaml_text
from megatron_snip.reporting.events import (
    Event,
    Measurement,
    Metrics,
    Notice,
    Payload,
    PlanApplied,
    Settings,
    Writer,
)
from megatron_snip.reporting.run_record import parse_divergences
from megatron_snip.reporting.scalars import ScalarSeries
from megatron_snip.statistics.health_table import Finding, series_name

logger = logging.getLogger(__name__)

WriterFactory = Callable[[Mapping[str, Any]], Writer]
"""Makes a writer from the run's settings (those of `SnipConfig`, as plain values)."""

WRITERS: dict[str, WriterFactory] = {}
"""Writers that plugins add, by name; rank 0 makes one of each (`megatron_snip/plugins.py`)."""


def added_writers(settings: Mapping[str, Any]) -> list[Writer]:
    """Rank 0: return the writers that plugins add; one that cannot be made is left out."""
    return made_writers({name: partial(make, settings) for name, make in WRITERS.items()})


def made_writers(makers: Mapping[str, Callable[[], Writer]]) -> list[Writer]:
    """Return what `makers` make, by name; a writer that cannot be made is left out."""
    writers = []
    for name, make in makers.items():
        try:
            writers.append(make())
        except Exception as error:  # one rank writes: its error would leave the others waiting
            line = log_failure(logger, f"making the writer '{name}'", error)
            warn_once(logger, f"snip: without the writer '{name}': {line}")
    return writers


class Dashboard(ABC):
    """A writer that shows a run's scalars, settings, plans and notices."""

    def __init__(
        self,
        board: Any,
        config: Mapping[str, Any],
        interval: int = 1,
        left_out: Collection[str] = (),
    ) -> None:
        """Show the settings, and start to write.

        Args:
            board: What it writes to: a `SummaryWriter`, which its maker closes, or the module
                `wandb`, for example.
            config: The run's settings as plain values.
            interval: Number of iterations between metrics that are written.
            left_out: Names (in `Metrics`) of training metrics that are not wanted.
        """
        self._board = board
        self._interval = max(1, interval)
        self._scalars = ScalarSeries(config, left_out)
        self._show("config", dict(config), 0)

    def write(self, event: Event) -> None:
        """Write an event."""
        scalars = self._scalars.values(event)
        payload = event.payload
        if isinstance(payload, Settings):
            fixed = {"fixed": payload.fixed} if payload.fixed else {}
            self._show("config", payload.values | fixed, 0)
            return
        if isinstance(payload, PlanApplied) and payload.resolved is not None:
            self._show("precision", payload.resolved.overview(), event.iteration)
        is_ordinary = isinstance(payload, Metrics) and not payload.is_addition
        if not is_ordinary or event.iteration % self._interval == 0:
            self._log(event.iteration, payload, scalars)

    @abstractmethod
    def _show(self, name: str, values: dict[str, Any], iteration: int) -> None:
        """Show values under a name, in place of those before: `config` or `precision`."""

    @abstractmethod
    def _log(self, iteration: int, payload: Payload, scalars: dict[str, float]) -> None: ...


_CHARTS = {
    "training loss": ["snip/1_loss", "lm loss$"],
    "loss spikes, failed refreshes": ["snip/1_guard_events", "snip/refresh/failed"],
    "quality loss of the plan": ["snip/2_quality_loss_share"],
    "share of FLOPs in the lowest precision": ["snip/3_lowest_precision_share"],
    "time of measuring in percent": ["snip/4_refresh_overhead_percent"],
    "share of FLOPs by format": ["snip/share/"],
    "divergences": ["snip/divergence/"],
    "most fragile linears": ["snip/linear/.*/quality_loss"],
    "gradient noise": ["snip/health/gradient_noise/"],
}
TENSORBOARD_LAYOUT = {"SNIP": {title: ["Multiline", tags] for title, tags in _CHARTS.items()}}
"""TensorBoard's tab "Custom scalars": chart -> regular expressions of the series that it shows."""


class TensorBoardWriter(Dashboard):
    """Writes through a `torch.utils.tensorboard.SummaryWriter`."""

    def _show(self, name: str, values: dict[str, Any], iteration: int) -> None:
        self._add_text(f"snip/{name}", yaml_text(values), iteration)
        if name == "config":
            self._board.add_custom_scalars(TENSORBOARD_LAYOUT)

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


class WandbWriter(Dashboard):
    """Logs to the W&B run that is active; its config has the settings as `snip`.

    `snip_precision` in its config is what linears run now.

    Once W&B's own process has died or does not answer, nothing more is logged: it never comes back,
    and each call could wait for half a minute.

    W&B refuses rows of earlier steps. A W&B run that continues after training went back to a
    checkpoint has those rows already; they are left out, with one warning. Plans and alerts are
    not. A row that is late, because a picture took long, is logged at the step that the run has
    reached.
    """

    _has_stopped = False
    _first_step: int | None = None

    def write(self, event: Event) -> None:
        """Write an event.

        Raises:
            SnipError: once, if W&B has stopped.
        """
        if self._has_stopped:
            return
        try:
            super().write(event)
        except Exception as error:
            is_of_wandb = type(error).__module__.partition(".")[0] == "wandb"
            if not (is_of_wandb or isinstance(error, ConnectionError | TimeoutError)):
                raise
            self._has_stopped = True
            text = f"W&B has stopped ({type(error).__name__} {one_line(error)}".rstrip()
            raise SnipError(f"{text}); the rest of the run is not logged there") from None

    def _show(self, name: str, values: dict[str, Any], iteration: int) -> None:
        key = "snip" if name == "config" else f"snip_{name}"
        self._board.config.update({key: values}, allow_val_change=True)

    def _log(self, iteration: int, payload: Payload, scalars: dict[str, float]) -> None:
        run = self._board.run
        if run is None:
            return
        if self._first_step is None:
            self._first_step = int(run.step)
        if iteration < self._first_step:
            warn_once(
                logger,
                "the W&B run is at a later step than training: rows of iterations that it has "
                "already are left out there",
            )
        else:
            row = self._row(payload, scalars)
            run.log(row, step=max(iteration, int(run.step)))
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

    def _row(self, payload: Payload, scalars: dict[str, float]) -> dict[str, Any]:
        """Return a payload's row: numbers, pictures and a table of the worst health."""
        row = dict[str, Any](scalars)
        for name, picture in pictures(payload).items():
            row[name] = self._board.Image(picture)
        if isinstance(payload, Measurement):
            run = self._board.run
            links = {name.removesuffix("/worst"): _panel(run, name) for name in row}
            table = self._board.Table(columns=[*Finding._fields, "series"])
            for each in payload.health.worst():
                series = series_name(each.measure, each.tensor)
                table.add_data(*each, links.get(f"snip/health/{series}", ""))
            row["snip/health/worst"] = table
        return row

    def close(self) -> None:
        """Leave the run to its maker."""


def start_wandb(project: str, directory: Path, config: Mapping[str, Any], run_id: str = "") -> Any:
    """Start a W&B run, offline unless WANDB_MODE says otherwise; return the module `wandb`.

    Args:
        project: name of the project.
        directory: W&B's files go to a folder in it.
        config: settings to show with the run.
        run_id: the W&B run to continue; empty for a new one. Offline, `wandb sync` joins the two.

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
        wandb.init(
            project=project,
            dir=directory,
            config=dict(config),
            mode=mode,
            id=run_id or None,
            resume="allow" if run_id else None,
            settings=quiet,
        )
    except (wandb.errors.Error, ValueError) as error:
        raise UsageError(f"wandb cannot start (WANDB_MODE is '{mode}'): {error}") from None
    return wandb


def pictures(payload: Payload) -> dict[str, Any]:
    """Return {name: figure} of a measurement, or of a plan that is new; empty without matplotlib.

    A plan is new if it changes a linear, or if a resumed run continues with it.
    """
    match payload:
        case PlanApplied(num_changed=0, resumed=False) | Notice() | Metrics() | Settings():
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
    if record.uniform_quantized_options:
        found["snip/5_fragile_linears"] = figures.divergence_maps(record)
    if payload.health.lowest is not None:
        found["snip/health/maps"] = figures.health_maps([payload.health])
    return found


def _panel(run: Any, name: str) -> str:
    """Return the address of a series' panel, or its name: offline, W&B knows no address.

    Source: https://docs.wandb.ai/models/app/features/panels, "Compose a panel's full-screen link".
    """
    project = run.settings.project_url
    query = urlencode({"panelDisplayName": name, "panelSectionName": name.partition("/")[0]})
    return f"{project}?{query}" if project else name
