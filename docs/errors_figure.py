"""Draws docs/how-it-works.png: three ways in which quantizing one linear changes the updates.

    python docs/errors_figure.py             write the picture

Layers from left to right; in each, the forward's output above, the backward's gradient in the
middle and the weight's update below. The linear in the middle is quantized; arrows lead from its
three errors to the updates that they change.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURE = Path(__file__).with_name("how-it-works.png")
GREY, FORWARD, BACKWARD, LOCAL = "#555555", "#0060a8", "#b04a00", "#2e7d32"
ROWS = {"Y": 3.0, "G": 1.75, "W": 0.4}
COLUMNS = {"k < l": 1.0, "l": 4.0, "k > l": 7.0}


def draw() -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(9, 4.6), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.9, 9.2), ylim=(-0.75, 3.9))
    axes.axis("off")
    for layer, x in COLUMNS.items():
        axes.text(x, 3.75, f"linear {layer}", ha="center", va="center", fontsize=11, color=GREY)
        _box(axes, x, ROWS["Y"], "Y = X W$^T$", layer == "l")
        _box(axes, x, ROWS["G"], "dX = G W", layer == "l")
        _box(axes, x, ROWS["W"], "update(dW = G$^T$ X)", layer == "l")
    _training(axes)
    _errors(axes)
    return figure


def _box(axes: Axes, x: float, y: float, text: str, quantized: bool) -> None:
    style = {"boxstyle": "round,pad=0.45", "facecolor": "#fff4d6" if quantized else "#f2f2f2"}
    style |= {"edgecolor": "#c79a00" if quantized else "#bbbbbb"}
    axes.text(x, y, text, ha="center", va="center", fontsize=10.5, color="black", bbox=style)


def _training(axes: Axes) -> None:
    """What a step does anyway, in grey: forward to the loss and back."""
    xs = list(COLUMNS.values())
    for left, right in zip([-0.5, *xs], [*xs, 8.75], strict=True):
        _arrow(axes, (left + 0.75, ROWS["Y"]), (right - 0.75, ROWS["Y"]), GREY, 0.8)
        _arrow(axes, (right - 0.75, ROWS["G"]), (left + 0.75, ROWS["G"]), GREY, 0.8)
    axes.text(8.55, (ROWS["Y"] + ROWS["G"]) / 2, "loss", ha="center", va="center", fontsize=11)
    _arrow(axes, (8.55, ROWS["Y"] - 0.1), (8.55, 2.55), GREY, 0.8)
    _arrow(axes, (8.55, 2.2), (8.55, ROWS["G"] + 0.1), GREY, 0.8)


def _errors(axes: Axes) -> None:
    left, own, right = COLUMNS.values()
    top = ROWS["W"] + 0.3
    axes.text(own + 0.85, 2.5, "eY", fontsize=12, color=FORWARD, weight="bold")
    for x in (left + 0.45, own + 0.75, right):
        _arrow(axes, (own + 0.3, ROWS["Y"] - 0.3), (x, top), FORWARD, 1.6, dashed=True)
    axes.text(own - 1.35, 0.95, "eX", fontsize=12, color=BACKWARD, weight="bold")
    _arrow(axes, (own - 0.6, ROWS["G"] - 0.28), (left + 0.05, top), BACKWARD, 1.6)
    axes.text(own - 0.42, 1.05, "eW", fontsize=12, color=LOCAL, weight="bold")
    _arrow(axes, (own, ROWS["G"] - 0.28), (own, top), LOCAL, 1.6)
    words = (
        ("fwd: through the output, to every update", FORWARD, -0.7),
        ("bwd: through the gradient, to those below", BACKWARD, 3.05),
        ("loc: its own update", LOCAL, 7.0),
    )
    for text, colour, x in words:
        axes.text(x, -0.42, text, fontsize=10, color=colour)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    width: float,
    dashed: bool = False,
) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": width}
    axes.annotate("", end, start, arrowprops=style | {"ls": "--" if dashed else "-"})


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=130, metadata={"Software": None})
