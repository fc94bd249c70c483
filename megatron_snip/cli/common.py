"""What subcommands share: tables for terminals, parsers of numeric flags, files for results."""

import argparse
import contextlib
from pathlib import Path

from rich import box
from rich.table import Table

from megatron_snip.errors import UsageError
from megatron_snip.files import write_atomic

LARGEST = 2**31 - 1
"""Limit of flags that take a number: no size, count or iteration is larger."""


def new_table(text_columns: tuple[str, ...], number_columns: tuple[str, ...] = ()) -> Table:
    """Return an empty table. A text that does not fit its column is folded, never cut."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in text_columns:
        table.add_column(name, overflow="fold")
    for name in number_columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def integer(text: str, least: int = 1) -> int:
    """Return the integer of a flag, for argparse.

    Raises:
        argparse.ArgumentTypeError: if it is no integer, below `least` or above `LARGEST`.
    """
    with contextlib.suppress(ValueError):
        if least <= int(text) <= LARGEST:
            return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer from {least} to {LARGEST}, got '{text}'")


def positive(text: str) -> float:
    """Return the number of a flag, above 0 and below `LARGEST`, for argparse.

    Raises:
        argparse.ArgumentTypeError: if it is no such number.
    """
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < LARGEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, got '{text}'")


def write_output(path: Path, text: str, make_folder: bool = False) -> None:
    """Write a result to a file, atomically; its folder is made if asked for.

    Raises:
        UsageError: if it cannot be written, or is `-`, by which other programs mean stdout.
    """
    if str(path) == "-":
        raise UsageError("--output: '-' is no file; /dev/stdout prints the result")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror or error}") from None
