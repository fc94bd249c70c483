"""What subcommands share: tables, progress on a terminal, numeric flags, files for results."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_snip.directory import run_with
from megatron_snip.errors import UsageError
from megatron_snip.files import read_json, write_atomic
from megatron_snip.output import console

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


@contextlib.contextmanager
def progress(what: str, out: Console | None = None) -> Iterator[Callable[[float], None]]:
    """Show a bar and the time left while the block runs, if stderr is a terminal; else nothing.

    Args:
        what: what is done, in a few words.
        out: prints lines above the bar; a console on stderr.

    Yields:
        A function to call with the share of the work that is done, from 0 to 1.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console(stderr=True) if out is None else out,
        transient=True,
        disable=not sys.stderr.isatty(),
        redirect_stdout=False,  # a result is not moved to stderr
    ) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


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


def capability(text: str) -> tuple[int, int]:
    """Return the compute capability (major, minor) of a flag, for argparse.

    Raises:
        argparse.ArgumentTypeError: if it has another form.
    """
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be like 9.0 or 10.0, got '{text}'")
    return int(match[1]), int(match[2])


def check_output(path: Path, inputs: Iterable[Path | None], kind: str = "") -> None:
    """Refuse an output that would replace what a command reads, or another file of SNIP's.

    Args:
        path: the file to write; it need not exist.
        inputs: the files that the command reads; None counts for nothing.
        kind: what is written, of the values of `_KINDS`; empty for others.

    Raises:
        UsageError: if it is one of the inputs under any name, has the name of a run's own file in
            the run's directory, holds a record of another kind, or is `-`, by which other programs
            mean stdout.
    """
    if str(path) == "-":
        raise UsageError("--output: '-' is no file; /dev/stdout prints the result")
    try:
        for given in inputs:
            if given is not None and given.exists() and path.exists() and path.samefile(given):
                raise UsageError(
                    f"--output: '{path}' is '{given}', which this command reads; name another file"
                )
        run = run_with(path)
        found = _kind_of(path)
    except (OSError, ValueError):  # a name too long, or a NUL in it: writing says so
        return
    if run is not None:
        raise UsageError(f"--output: '{path}' is a file of the run in '{run}'; name another file")
    if found not in ("", kind):
        raise UsageError(f"--output: '{path}' holds a {found}; name another file, or remove it")


_KINDS = {
    "digest": "plan",
    "machine": "table of seconds",
    "iteration": "measurement",
    "target": "problem",
}
"""The first of these keys that a record has: what it is."""


def _kind_of(path: Path) -> str:
    """Return what record a file holds; empty where it is none, or there is no file."""
    if not path.is_file():
        return ""
    try:
        value = read_json(path, "file")
    except UsageError:
        return ""
    if not isinstance(value, dict) or "linears" not in value:
        return ""
    return next((kind for key, kind in _KINDS.items() if key in value), "")


def write_output(path: Path, text: str, make_folder: bool = False) -> None:
    """Write a result to a file that `check_output` allows, atomically.

    Args:
        path: the file.
        text: its content.
        make_folder: whether its folder is made.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write '{path}': {reason}") from None
