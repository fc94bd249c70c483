"""A page of figures and tables as one HTML file.

The file needs no network and runs no script; its Content-Security-Policy forbids both. The template
escapes all text, since names and settings come from files.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from megatron_snip.errors import UsageError
from megatron_snip.files import write_atomic
from megatron_snip.reporting.figures import Draw, svg
from megatron_snip.version import __version__

TEMPLATE = "report.html.j2"
FILE = "report.html"


@dataclass(frozen=True)
class Table:
    """Cells of text.

    Attributes:
        title: a few words.
        columns: headings.
        rows: one cell per column.
        text_columns: how many columns, from the left, are left-aligned; numbers follow.
        note: a sentence below the table.
        folded: whether the table is shown only on demand.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    note: str = ""
    folded: bool = True


@dataclass(frozen=True)
class Picture:
    """A figure with its text.

    Attributes:
        slug: unique on the page.
        title: a few words.
        caption: what it shows, also the text for readers who do not see it; where there is no
            figure, why.
        draw: draws the figure; None where there is none.
    """

    slug: str
    title: str
    caption: str
    draw: Draw | None = None


@dataclass(frozen=True)
class Section:
    """Pictures, then tables, under a heading; the first section of a page needs none."""

    title: str
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: of the browser's tab and of the page.
        subtitle: a sentence.
        sections: in order.
        tiles: (label, value, note) of large numbers at the top.
    """

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    tiles: tuple[tuple[str, str, str], ...] = ()


def page_html(page: Page) -> str:
    """Return the page as HTML; the figures are drawn here."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["image"] = _data_uri
    source = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page, version=__version__)


def write_page(page: Page, directory: Path) -> Path:
    """Write report.html into `directory`, which is made if needed; return its path.

    Raises:
        UsageError: if it cannot be written.
    """
    text = page_html(page)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / FILE, text)
    except OSError as error:
        raise UsageError(f"cannot write '{directory}': {error.strerror or error}") from None
    return directory / FILE


def _data_uri(picture: Picture) -> str:
    assert picture.draw is not None
    return "data:image/svg+xml;base64," + base64.b64encode(svg(picture.draw)).decode("ascii")
