"""The errors a caller can act on; each message says what was got, what was wanted, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 2000
"""Characters of an error that are shown."""


class SnipError(Exception):
    """Base of all errors that this package raises on purpose."""


class UsageError(SnipError):
    """Bad input from a user (flag, file, size). The command line prints it and exits with 2."""


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
    """A combination of settings that cannot run here; the message names both and the remedy."""


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'NAME'?)` for the most similar known name, or nothing."""
    similar = difflib.get_close_matches(got[:100], list(known), n=1)
    return f" (did you mean '{similar[0]}'?)" if similar else ""


def shown(error: BaseException | str) -> str:
    """Return an error as one line that any terminal may show.

    What it quotes may come from a hostile file: line breaks, escape sequences and lone surrogates
    appear as Python would write them, and of an endless text only the ends.
    """
    text = _ends(str(error))  # cut before as well: escaping all of it could take as long as it is
    return _ends(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def _ends(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 203]}...{text[-200:]}"
