"""Colors and settings of matplotlib that all figures share."""

from collections import Counter
from typing import Any

from megatron_snip.formats import FORMATS

SURFACE = "#ffffff"
MUTED = "#6b7685"
FAINT = "#e3e7ec"
WARNING = "#c2251c"
LINE = "#1f6fd1"

STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "figure.dpi": 144,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "megatron-snip",  # the same figure is the same file
}

_SHADES = {
    16: ("#b9c0ca",),
    8: ("#3f83d1", "#83b3e6", "#1f5fa8", "#5c9bd8", "#14406f", "#a9cbef", "#2d74b8"),
    4: ("#f0912f", "#f7bd75", "#d66a12", "#a34f0c"),
}
"""16 bits gray, 8 bits blue, 4 bits orange; other formats are red."""
_REDS = ("#b3261e", "#d9736d")


def format_colors() -> dict[str, str]:
    """Return a color for each format: its bits give the hue.

    Its place among the formats of this hue gives the shade. Not a constant: plugins add formats.
    """
    used: Counter[tuple[str, ...]] = Counter()
    colors = {}
    for name, fmt in FORMATS.items():
        shades = _SHADES.get(fmt.bits, _REDS)
        colors[name] = shades[used[shades] % len(shades)]
        used[shades] += 1
    return colors
