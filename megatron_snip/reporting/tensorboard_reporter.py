"""TensorBoard: step reports as scalars, histograms, pictures and text.

    every report    its scalars
    a refresh       histograms and heat maps of the divergences
    a plan          a table and a picture at every change and on going on
    the first one   the settings, as text
    an event        a line of text; TensorBoard knows no alerts

`tensorboard` is optional; torch writes its files and Megatron keeps such a writer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_snip.errors import UsageError
from megatron_snip.reporting.media import (
    PLAN_COLUMNS,
    divergence_figure,
    divergence_values,
    plan_figure,
    plan_rows,
)
from megatron_snip.reporting.reporter import Applied, Refresh
from megatron_snip.reporting.step_report import StepReport, StepReporter


class TensorBoardWriter:
    """Writes through a `torch.utils.tensorboard.SummaryWriter` that somebody else closes.

    Args:
        writer: it.
        config: settings as plain values, shown as text.
    """

    def __init__(self, writer: Any, config: Mapping[str, Any]) -> None:
        self._writer = writer
        self._config: Mapping[str, Any] | None = config

    def write(self, report: StepReport) -> None:
        """Write a step; with a refresh or a plan, put it on disk."""
        if self._config is not None and (report.refresh or report.applied):
            text = yaml.safe_dump(dict(self._config), sort_keys=False)
            self._writer.add_text("snip/config", _block(text.splitlines()), report.index)
            self._config = None
        for name, value in report.scalars.items():
            self._writer.add_scalar(name, value, report.index)
        if report.refresh is not None:
            self._divergences(report.refresh, report.index)
        if report.applied is not None:
            self._plan(report.applied, report.index)
        for event in report.events:
            text = _block([f"{event.kind}: {event.message}"])
            self._writer.add_text("snip/controller/event", text, report.index)
        if report.refresh or report.applied or report.events:
            self._writer.flush()

    def _divergences(self, refresh: Refresh, index: int) -> None:
        import numpy as np

        for name, values in divergence_values(refresh.divergences).items():
            if values:
                self._writer.add_histogram(name, np.array(values), index)
        with divergence_figure(refresh) as figure:
            if figure is not None:
                self._picture("snip/divergence/maps", figure, index)

    def _plan(self, applied: Applied, index: int) -> None:
        if applied.num_changed == 0 and not applied.resumed:
            return
        rows = [PLAN_COLUMNS, tuple("---" for _ in PLAN_COLUMNS), *plan_rows(applied.plan)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        self._writer.add_text("snip/planning/plan", table, index)
        with plan_figure(applied.plan) as figure:
            if figure is not None:
                self._picture("snip/planning/plan_map", figure, index)

    def _picture(self, name: str, figure: Any, index: int) -> None:
        # `add_figure` imports pyplot, whose state belongs to the user.
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure.set_dpi(144)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]  # [height, width, rgb], uint8
        self._writer.add_image(name, pixels, index, dataformats="HWC")


class TensorBoardReporter(StepReporter):
    """Writes TensorBoard files of its own; on the reporting rank only."""

    def __init__(self, directory: Path, config: Mapping[str, Any], first_step: int = 0) -> None:
        """Open the files.

        Args:
            directory: for the event files; made if need be.
            config: shown as text.
            first_step: of this process; what a stopped run wrote of it and later steps is void.

        Raises:
            UsageError: if tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard was asked for but is not installed; "
                "pip install 'megatron-snip[tensorboard]'"
            ) from None
        self._files = SummaryWriter(str(directory), purge_step=first_step or None)
        super().__init__([TensorBoardWriter(self._files, config)])

    def close(self) -> None:
        """Write and close the files; nothing is written after."""
        super().close()
        self._files.close()


def _block(lines: Sequence[str]) -> str:
    """Return lines as TensorBoard's markdown shows them unchanged."""
    return "\n".join(f"    {line}" for line in lines)
