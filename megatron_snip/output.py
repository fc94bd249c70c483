"""Text that leaves the program, escaped once by the writer of its format.

    terminal   `shown` for one line, `console` for tables and paragraphs
    YAML       `yaml_text`
    CSV        `csv_text`
    HTML       the Jinja environment of reporting/report.py

Names and labels in it may come from a hostile file. Whoever has text to write passes it raw to one
of these functions, so that nothing is escaped twice.
"""

import contextlib
import csv
import io
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import yaml
from rich.console import Console
from rich.text import Text

from megatron_snip.errors import printable
from megatron_snip.files import FIRST_OF_NUMBERS, NUMBERS

WIDTH = 100
"""Characters per line where the output is not a terminal."""

_FORMULA = ("=", "+", "-", "@")


class _PlainConsole(Console):
    """Prints text as it is, never as markup; a control character is shown, never sent."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, keep="\n"), **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich's own would exit with 1; `main` handles it for all commands


def console(stderr: bool = False) -> Console:
    """Return a console for tables, or for progress on stderr."""
    stream = sys.stderr if stderr else sys.stdout
    width = min(shutil.get_terminal_size().columns, 2 * WIDTH) if stream.isatty() else WIDTH
    return _PlainConsole(width=width, highlight=False, markup=False, emoji=False, stderr=stderr)


def yaml_text(value: Mapping[str, Any], comment: Sequence[str] = (), **style: Any) -> str:
    """Return a YAML document under a comment.

    Args:
        value: plain values.
        comment: lines; a line break within one is escaped, so that it cannot begin a key.
        style: arguments of `yaml.safe_dump`.
    """
    head = "".join(f"# {printable(line)}\n" for line in comment)
    return head + str(yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, **style))


def in_utf8(text: str) -> str:
    """Return text with what UTF-8 cannot hold escaped: parts of a path in another encoding."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Dumper(yaml.SafeDumper):
    """Writes only what a YAML reader accepts."""


for _tag, _pattern in NUMBERS.items():  # a text that we would read as a number is quoted
    _Dumper.add_implicit_resolver(_tag, _pattern, FIRST_OF_NUMBERS)
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_str(in_utf8(text)))


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV, for spreadsheets too: a text never begins as a formula does.

    Such a text gets an apostrophe in front, as spreadsheets write it. Numbers stay as they are.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in rows:
        writer.writerow([_cell(value) if isinstance(value, str) else value for value in row])
    return stream.getvalue()


def _cell(text: str) -> str:
    text = printable(text)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


class _LastingFile(io.FileIO):
    """A file descriptor whose reader may go away, or whose disk may fill: then text is lost."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return memoryview(data).nbytes


def outlive_output() -> None:
    """Let this process go on when nobody reads what it prints.

    Training must not end with the terminal, with `| head`, or with the disk of its log. Characters
    that the encoding of a stream lacks are escaped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or a test's own
            if not isinstance(getattr(stream.buffer, "raw", None), _LastingFile):
                stream.flush()
                setattr(sys, name, _lasting(stream))


def _lasting(stream: TextIO) -> TextIO:
    file = _LastingFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )
