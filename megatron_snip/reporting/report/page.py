"""The page: everything as text, then one HTML file by an autoescaping template.

The file asks the network for nothing and runs no script; its Content-Security-Policy says so, which
also disarms whatever a name in a run's files might try.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from megatron_snip.reporting.report.picture import Missing, Rendering
from megatron_snip.reporting.report.tables import Table, Tile
from megatron_snip.version import __version__

TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        title: its heading.
        pictures: rendered ones, and those that cannot be drawn, in order.
        tables: below the pictures.
    """

    title: str
    pictures: tuple[Rendering | Missing, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Attributes:
        title: of the browser's tab and the page.
        subtitle: a sentence.
        tiles: large numbers; none where runs are compared.
        tables: at the top, below the tiles.
        parts: sections.
    """

    title: str
    subtitle: str
    tiles: tuple[Tile, ...]
    tables: tuple[Table, ...]
    parts: tuple[Part, ...]


def page_html(page: Page) -> str:
    """Return the page as HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    template = environment.from_string(source)
    return template.render(page=page, version=__version__)
