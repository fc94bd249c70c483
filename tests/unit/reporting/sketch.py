"""Pictures for tests that look at something else: drawn once, and never rendered."""

import pytest

from megatron_snip.reporting.figures.canvas import HALF, WIDE
from megatron_snip.reporting.report import build
from megatron_snip.reporting.report.picture import Picture, Rendering

SIZES = ("wide_light", "wide_dark", "narrow_light", "narrow_dark")


def sketch(picture: Picture) -> Rendering:
    """Stand in for `picture.render`, which takes most of a second a picture."""
    canvas = WIDE if picture.wide else HALF
    with canvas.style():
        size = picture.draw(canvas).get_size_inches()
    return Rendering(picture, dict.fromkeys(SIZES, "data:,"), f"{picture.alt}{size}".encode())


def only_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports sketch."""
    monkeypatch.setattr(build, "render", sketch)
