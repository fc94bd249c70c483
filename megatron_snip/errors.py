"""The errors a caller can act on; each message says what was got, what was wanted, what to do."""

from __future__ import annotations


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
