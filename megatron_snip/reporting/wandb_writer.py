"""WandbWriter: step reports into a W&B run, whoever has started it.

    every report    its scalars
    a refresh       histograms and heat maps of the divergences
    a plan          the plan file as an artifact; at every change and on going on, a table and a
                    picture
    an event        an alert

W&B takes no row whose step is lower than its last one. A W&B run that is gone on with after
training went back to a checkpoint has those rows already; they are left out, with one warning.
"""

from __future__ import annotations

import io
import logging
from typing import Any

from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.media import (
    PLAN_COLUMNS,
    divergence_figure,
    divergence_values,
    plan_figure,
    plan_rows,
)
from megatron_snip.reporting.reporter import Applied, Event, Refresh
from megatron_snip.reporting.step_report import StepReport

logger = logging.getLogger(__name__)

ARTIFACT_TYPE = "snip-plan"


class WandbWriter:
    """Logs to the W&B run that is under way.

    Args:
        wandb: the module; `wandb.run` is None once the run is finished, and nothing is logged then.
    """

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb
        self._behind = False

    def write(self, report: StepReport) -> None:
        """Log a step."""
        run = self._wandb.run
        if run is None:
            return
        if report.index < run.step:
            if not self._behind:
                logger.warning(
                    "the W&B run is at step %d and training at %d: "
                    "steps that it has already are left out",
                    run.step,
                    report.index,
                )
            self._behind = True
            return
        self._behind = False
        row: dict[str, Any] = dict(report.scalars)
        if report.refresh is not None:
            row |= self._divergences(report.refresh)
        if report.applied is not None:
            row |= self._plan(report.applied)
        run.log(row, step=report.index)
        if report.applied is not None:
            self._keep(run, report.applied.plan)
        for event in report.events:
            self._alert(run, event)

    def _divergences(self, refresh: Refresh) -> dict[str, Any]:
        row = {
            name: self._wandb.Histogram(values)
            for name, values in divergence_values(refresh.divergences).items()
            if values
        }
        with divergence_figure(refresh) as figure:
            if figure is not None:
                row["snip/divergence/maps"] = self._image(figure)
        return row

    def _plan(self, applied: Applied) -> dict[str, Any]:
        if applied.num_changed == 0 and not applied.resumed:
            return {}
        rows = plan_rows(applied.plan)
        table = self._wandb.Table(columns=list(PLAN_COLUMNS), data=[list(row) for row in rows])
        row: dict[str, Any] = {"snip/planning/plan": table}
        with plan_figure(applied.plan) as figure:
            if figure is not None:
                row["snip/planning/plan_map"] = self._image(figure)
        return row

    def _image(self, figure: Any) -> Any:
        # W&B's own way with figures goes through pyplot, whose state belongs to the user.
        from PIL import Image

        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=144)
        stream.seek(0)
        return self._wandb.Image(Image.open(stream))

    def _keep(self, run: Any, plan: PrecisionPlan) -> None:
        metadata = {
            "iteration": plan.iteration,
            "digest": plan.digest,
            "efficiency": plan.efficiency,
        }
        artifact = self._wandb.Artifact(f"plan-{run.id}", ARTIFACT_TYPE, metadata=metadata)
        with artifact.new_file(f"{plan.iteration}.json") as stream:
            stream.write(plan.to_json())
        run.log_artifact(artifact)

    def _alert(self, run: Any, event: Event) -> None:
        run.alert(
            title=f"SNIP: {event.kind} at step {event.step}",
            text=event.message,
            level=self._wandb.AlertLevel.WARN,
        )
