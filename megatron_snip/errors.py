"""The errors that a caller can act on; a message names what was got, is accepted, and to do."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

LONGEST = 2000
"""Characters of an error that are shown."""


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


def one_line(error: BaseException) -> str:
    """Return an error's message as one line of at most 500 characters."""
    return shortened(" ".join(str(error).split()), 500)


def shown(error: BaseException | str) -> str:
    """Return an error as one line that any terminal may show.

    What it quotes may come from a hostile file: line breaks, escape sequences and lone surrogates
    appear as Python would write them, and of an endless text only the ends.
    """
    text = _ends(str(error))  # cut before as well: escaping all of it could take as long as it is
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _ends(escaped)


def _ends(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 203]}...{text[-200:]}"
