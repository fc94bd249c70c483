"""The errors that a caller can act on; a message names what was got, is accepted, and to do."""

import difflib
import errno
import os
import re
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

LONGEST = 2000
"""Characters of an error that are shown."""

_NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
_OF_THE_MACHINE = {
    errno.EMFILE: "this process may not open more files: raise the limit (ulimit -n)",
    errno.ENOSPC: "free some space, or name another directory",
    errno.EDQUOT: "free some space, or name another directory",
    errno.EROFS: "name another directory",
    errno.EIO: "the disk or the network file system has failed; name another directory",
    errno.ESTALE: "the network file system has changed; start again, or name another directory",
    errno.EISDIR: "remove that folder, or name another directory",
    errno.ENOTDIR: "name another directory",
    errno.EBUSY: "name another directory",
    errno.ENOLCK: "the file system has no locks left; name another directory",
}


class SnipError(Exception):
    """Base of all errors that this package raises on purpose."""


class UsageError(SnipError):
    """Bad input from a user (flag, file, size). The command line prints it and exits with 2.

    Attributes:
        message: one line.
        field: name of the setting that is wrong, or None if it is not a setting. `str` puts it
            before the message; whoever reads flags puts the flag there.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message if self.field is None else f"{self.field}: {self.message}"


class InfeasiblePlanError(SnipError):
    """No assignment satisfies the constraints.

    Attributes:
        conflicts: names of constraints that cannot hold together (a subset, in order).
        best_target: highest reachable efficiency in [0, 1] under the remaining constraints,
            or None where it was not computed.
    """

    def __init__(
        self, message: str, conflicts: tuple[str, ...] = (), best_target: float | None = None
    ) -> None:
        super().__init__(message)
        self.conflicts = conflicts
        self.best_target = best_target


class PlanningError(SnipError):
    """A plan could not be made (solver failed, timed out without a solution, bad worker reply)."""


class UnsupportedError(SnipError):
    """Settings that cannot run here; each message names one, the reason and the remedy.

    Attributes:
        messages: one line each.
    """

    def __init__(self, *messages: str) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Within: a UsageError that names no setting is about the setting `field`."""
    try:
        yield
    except UsageError as error:
        error.field = error.field or field
        raise


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean '...'?)` for the name in `known` nearest to `word`, or ''."""
    names = list(known)
    longer = [name for name in names if name.startswith(word)]
    near = longer or difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def listing(names: Sequence[str], most: int = 6) -> str:
    """Return `a, b, c and 12 more`: at most `most` names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def exit_text(status: int) -> str:
    """Return how a process ended, by its exit status, which a signal makes negative."""
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):  # a real-time signal has no name
        return signal.Signals(-status).name
    return f"signal {-status}"


def one_line(error: BaseException) -> str:
    """Return an error's message as one line of at most 500 characters."""
    return shortened(" ".join(str(error).split()), 500)


def shown(error: BaseException | str) -> str:
    """Return an error as one line that any terminal may show.

    What it quotes may come from a hostile file: line breaks, escape sequences and lone surrogates
    appear as Python would write them, and of an endless text only the ends.
    """
    text = _ends(str(error))  # cut before as well: escaping all of it could take as long as it is
    return _ends(printable(text))


def known_failure(error: BaseException) -> str | None:
    """Return one line for a failure of the machine or of an installed package; None for a bug.

    It may be the cause of an error that a package raised instead. Memory that cannot be had, a full
    disk, too many open files, a package that breaks when it is imported. torch and NumPy raise the
    first three as their own errors, too.
    """
    package = _broken_package(error)
    if package is not None:
        text = f"cannot import {package}: {type(error).__name__}: {one_line(error)}"
        return f"{text}; install it again ('megatron-snip doctor' shows what else is broken)"
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        asked = re.search(r"allocate ([\d.]+ ?[A-Za-z]+)|sizes?=(\[[\d, ]*\])", text)
        size = f" (asked for {asked[1] or asked[2]})" if asked else ""
        return f"out of memory{size}: take a smaller model, sequence or batch, or more ranks"
    number = error.errno if isinstance(error, OSError) else None
    for known, advice in _OF_THE_MACHINE.items():
        if number == known or (number is None and os.strerror(known) in text):
            return f"{one_line(error)}; {advice}"
    return None if error.__cause__ is None else known_failure(error.__cause__)


def _broken_package(error: BaseException) -> str | None:
    """Return the top-level package that was being imported when `error` was raised."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        ours = package in ("megatron_snip", "__main__")
        if frame.f_code.co_name == "<module>" and not ours:
            return package
    name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    ours = name is None or name.startswith("megatron_snip")
    return None if ours else str(name).partition(".")[0]


def printable(text: str, keep: str = "") -> str:
    """Return `text` with all but printable characters as Python would write them in a literal.

    Line breaks, escape sequences, directional marks and lone surrogates are not printable.

    Args:
        text: any text.
        keep: characters that stay although they are not printable.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def _ends(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 203]}...{text[-200:]}"
