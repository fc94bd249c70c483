"""The color of each number format: its bits give the hue, so that a plan reads at a glance.

16 bits gray, 8 bits blue, 4 bits orange, fewer red. Blue and orange stay apart for every common
kind of color vision, and differ in lightness when printed in gray.
"""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from megatron_snip.formats import FORMATS
from megatron_snip.reporting.figures.canvas import Theme

_COLORS: dict[str, dict[str, str]] = {
    "light": {
        "bf16": "#b9c0ca",
        "fp8": "#3f83d1",
        "mxfp8": "#83b3e6",
        "fp4": "#f0912f",
        "mxfp4": "#f7bd75",
        "nvfp4": "#d66a12",
        "fp3": "#b3261e",
    },
    "dark": {
        "bf16": "#6b7686",
        "fp8": "#3f83d1",
        "mxfp8": "#7fb0e4",
        "fp4": "#f0912f",
        "mxfp4": "#f7bd75",
        "nvfp4": "#d66a12",
        "fp3": "#e0533f",
    },
}
NAMES = tuple(FORMATS)
"""Formats by index, as `format_map` colors them."""


def format_color(name: str, theme: Theme) -> str:
    """Return the color of a format; one without a color of its own takes that of its bits."""
    colors = _COLORS[theme.name]
    if name in colors:
        return colors[name]
    return colors[_neighbour(FORMATS[name].bits)]


def format_map(theme: Theme) -> ListedColormap:
    """Return a color map from a format's index in `NAMES` to its color."""
    return ListedColormap([format_color(name, theme) for name in NAMES])


def format_legend(names: Iterable[str], theme: Theme) -> list[Patch]:
    """Return legend entries, the highest precision first."""
    ordered = sorted(set(names), key=lambda name: -FORMATS[name].bits)
    return [Patch(color=format_color(name, theme), label=name) for name in ordered]


def _neighbour(bits: int) -> str:
    """Return a format with a color whose bits are as many, or the next more."""
    if bits > 8:
        return "bf16"
    if bits > 4:
        return "fp8"
    return "fp4" if bits == 4 else "fp3"
