"""TensorBoard: step reports as scalars, histograms, pictures and text.

`tensorboard` is optional; torch writes its files and Megatron keeps such a writer of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.reporting.media import divergence_figure, divergence_values, plan_figure
from megatron_snip.reporting.reporter import Applied, Refresh
from megatron_snip.reporting.step_report import StepReport, StepReporter


class TensorBoardWriter:
    """Writes through a `torch.utils.tensorboard.SummaryWriter` that somebody else closes."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, report: StepReport) -> None:
        """Write a step; with a refresh or a plan, put it on disk."""
        for name, value in report.scalars.items():
            self._writer.add_scalar(name, value, report.index)
        if report.refresh is not None:
            self._divergences(report.refresh, report.index)
        if report.applied is not None:
            self._plan(report.applied, report.index)
        for event in report.events:
            text = f"**{event.kind}** {event.message}"
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
        if applied.num_changed == 0:
            return
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

    def __init__(self, directory: Path) -> None:
        """Open the files.

        Args:
            directory: for the event files; made if need be.

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
        self._files = SummaryWriter(str(directory))
        super().__init__([TensorBoardWriter(self._files)])

    def close(self) -> None:
        """Write and close the files; nothing is written after."""
        super().close()
        self._files.close()
