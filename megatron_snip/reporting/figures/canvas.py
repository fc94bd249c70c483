"""Canvas: how wide a picture is and whether it is light or dark; nothing about what it shows.

Why matplotlib, and why pictures without a script: one drawing gives the SVG in the report, the PNG
beside it, the image in W&B and TensorBoard and the picture in the documentation, with nothing but a
pip package (plotly and bokeh need a browser for a PNG and megabytes of JavaScript for a page). A
page without JavaScript opens anywhere, also where scripts are stripped (mail, CI artifacts, code
review), prints, and cannot do harm. What a script would add is given otherwise: each picture is
drawn for wide and narrow screens, light and dark, and the browser picks one; numbers are in tables.

Text is drawn as shapes, so that a picture looks alike with whatever fonts a reader has. `$` in a
name is no formula here (`text.parse_math`), so log axes use `short` for their labels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PIXELS_PER_INCH = 96
"""CSS pixels in an inch."""

_MOST_SHAPES = 600
"""Cells of a mesh that are stored as shapes; as pixels, thousands take a hundredth of the room."""


@dataclass(frozen=True)
class Theme:
    """Colors (#rrggbb) of everything but formats.

    Attributes:
        name: `light` or `dark`.
        surface: what pictures lie on.
        text: axis labels and numbers.
        muted: axis lines and marks of lesser weight.
        faint: grid lines, and cells without a value.
        warning: events.
        lines: of runs, in order; told apart by people who do not see red and green as two.
    """

    name: str
    surface: str
    text: str
    muted: str
    faint: str
    warning: str
    lines: tuple[str, ...]


LIGHT = Theme(
    name="light",
    surface="#ffffff",
    text="#1f2733",
    muted="#6b7685",
    faint="#e3e7ec",
    warning="#c2251c",
    lines=("#1f6fd1", "#d9730d", "#0f8a6b", "#b3307f", "#6d4bd1", "#4b5563"),
)
DARK = Theme(
    name="dark",
    surface="#171c24",
    text="#e4e8ee",
    muted="#8d97a6",
    faint="#2c343f",
    warning="#ff7b72",
    lines=("#6cb0ff", "#ffb454", "#4fd6a8", "#f58ac7", "#b39dff", "#a5afbd"),
)


@dataclass(frozen=True)
class Canvas:
    """What a picture is drawn on.

    Attributes:
        width_px: CSS pixels.
        theme: its colors.
        narrow: whether panels go below each other.
    """

    width_px: int
    theme: Theme = LIGHT
    narrow: bool = False

    def figure(self, height_in: float) -> Figure:
        """Return an empty figure of this width."""
        return Figure(figsize=(self.width_px / PIXELS_PER_INCH, height_in), layout="constrained")

    @contextmanager
    def style(self) -> Iterator[None]:
        """Within: figures are made and saved in this canvas's style."""
        theme = self.theme
        size = 8.0 if self.narrow else 9.0
        settings: dict[str, Any] = {
            "font.family": "DejaVu Sans",
            "font.size": size,
            "axes.titlesize": size,
            "axes.titlelocation": "left",
            "axes.labelsize": size,
            "xtick.labelsize": size - 0.5,
            "ytick.labelsize": size - 0.5,
            "legend.fontsize": size - 0.5,
            "legend.frameon": False,
            "text.color": theme.text,
            "text.parse_math": False,
            "axes.labelcolor": theme.text,
            "axes.titlecolor": theme.text,
            "axes.edgecolor": theme.muted,
            "axes.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.facecolor": "none",
            "figure.facecolor": "none",
            "grid.color": theme.faint,
            "grid.linewidth": 0.7,
            "xtick.color": theme.muted,
            "ytick.color": theme.muted,
            "xtick.labelcolor": theme.text,
            "ytick.labelcolor": theme.text,
            "svg.fonttype": "path",
            "svg.hashsalt": "megatron-snip",  # the same picture is the same file
            "path.simplify_threshold": 0.5,
        }
        with matplotlib.rc_context(settings):
            yield


WIDE = Canvas(1056)
HALF = Canvas(512)
NARROW = Canvas(348, narrow=True)


def mesh_style(canvas: Canvas, rows: int, cells: int, gap: bool) -> dict[str, Any]:
    """Return how `pcolormesh` draws cells: parted while few, stored as pixels where many.

    Args:
        canvas: what they are drawn on.
        rows: of cells; above 40 lines between them would hide them.
        cells: in all.
        gap: whether cells are parted at all; without, they are drawn over the seams between them.
    """
    if cells > _MOST_SHAPES:
        return {"rasterized": True, "edgecolors": "none", "antialiased": False}
    if gap and rows <= 40:
        return {"edgecolors": canvas.theme.surface, "linewidth": 1.5}
    return {"edgecolors": "face", "linewidth": 0.3}


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG on a transparent ground; call within its canvas's style."""
    stream = io.BytesIO()
    dpi = 2 * PIXELS_PER_INCH  # of what is stored as pixels
    figure.savefig(stream, format="svg", dpi=dpi, transparent=True, metadata={"Date": None})
    return stream.getvalue()


def png(figure: Figure, canvas: Canvas, dpi: int = 2 * PIXELS_PER_INCH) -> bytes:
    """Return the figure as PNG on the theme's surface; call within its canvas's style."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor=canvas.theme.surface)
    return stream.getvalue()


def short(value: float) -> str:
    """Return a number in few characters: 0.003, 2e-05, 12, 3e+06."""
    return f"{value:.3g}"


def step_ticks(most: int) -> MaxNLocator:
    """Return a locator of at most `most` round training steps."""
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])
