"""Picture: something to draw, with the words that go with it, and its renderings.

A picture is drawn four times (wide or narrow, light or dark); the page lets the browser choose.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_snip.reporting.figures.canvas import DARK, HALF, LIGHT, NARROW, WIDE, Canvas, png, svg

Draw = Callable[[Canvas], Any]


@dataclass(frozen=True)
class Picture:
    """What to draw and say.

    Attributes:
        slug: its PNG's name, without the ending; unique in a report.
        title: a few words.
        caption: how to read it, and what it shows here.
        alt: what it shows, for those who do not see it.
        draw: returns the figure for a canvas.
        wide: whether it takes the page's width or half of it.
    """

    slug: str
    title: str
    caption: str
    alt: str
    draw: Draw
    wide: bool = True


@dataclass(frozen=True)
class Missing:
    """A picture that cannot be drawn.

    Attributes:
        title: of the picture.
        reason: a sentence.
    """

    title: str
    reason: str


@dataclass(frozen=True)
class Rendering:
    """A picture as the page and the PNG file hold it.

    Attributes:
        picture: what was drawn.
        sources: data URI of each variant: wide_light, wide_dark, narrow_light, narrow_dark.
        png: wide and light.
    """

    picture: Picture
    sources: dict[str, str]
    png: bytes


def render(picture: Picture) -> Rendering:
    """Draw all variants."""
    wide = WIDE if picture.wide else HALF
    sources, image = {}, b""
    for size, width in (("wide", wide), ("narrow", NARROW)):
        for theme in (LIGHT, DARK):
            canvas = Canvas(width.width_px, theme, width.narrow)
            with canvas.style():
                figure = picture.draw(canvas)
                sources[f"{size}_{theme.name}"] = _uri(svg(figure))
                if size == "wide" and theme is LIGHT:
                    image = png(figure, canvas)
    return Rendering(picture, sources, image)


def _uri(image: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(image).decode("ascii")
