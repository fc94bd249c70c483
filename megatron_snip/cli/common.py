"""What subcommands share: tables for terminals, numbers from flags, files for results."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_snip.errors import UsageError
from megatron_snip.files import write_atomic

LARGEST = 2**31 - 1
"""No size, count or iteration is larger."""

WIDTH = 100
"""Characters per line where the output is not a terminal."""


def add_examples(parser: argparse.ArgumentParser, *lines: str) -> None:
    """Show command lines at the end of a command's help."""
    parser.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines)])


def console() -> Console:
    """Return a console for tables. Text from files is printed as it is, never as markup."""
    width = min(shutil.get_terminal_size().columns, 2 * WIDTH) if sys.stdout.isatty() else WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def new_table(text_columns: tuple[str, ...], number_columns: tuple[str, ...] = ()) -> Table:
    """Return an empty table. A text that does not fit its column is folded, never cut."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in text_columns:
        table.add_column(name, overflow="fold")
    for name in number_columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def integer(flag: str, text: str, least: int = 1) -> int:
    """Return the integer that a flag was given.

    Args:
        flag: its name in error messages.
        text: decimal digits.
        least: the smallest that is accepted.

    Raises:
        UsageError: if it is something else, or beyond `LARGEST`.
    """
    digits = text.strip()
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= len(str(LARGEST))
    if not is_number or not least <= int(digits) <= LARGEST:
        raise UsageError(f"{flag} must be an integer from {least} to {LARGEST}, got '{text}'")
    return int(digits)


def positive(flag: str, text: str) -> float:
    """Return the number above 0 that a flag was given.

    Raises:
        UsageError: if it is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < LARGEST:
        raise UsageError(f"{flag} must be a number above 0, got '{text}'")
    return value


def write_output(path: Path, text: str) -> None:
    """Write a result.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        write_atomic(path, text)
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror or error}") from None
