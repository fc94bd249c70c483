"""Lines that appear once: in this process, or in a job of many ranks; and failures in full.

Training goes on after a failure of ours: ranks exchange one line about it and keep the plan. The
traceback would be lost there, so `log_failure` logs it on the rank and at the place where it stops.
"""

import functools
import logging
import os
import traceback

from megatron_snip.errors import SnipError, known_failure, one_line

_current: dict[str, int] = {}
"""The value of the last `set_iteration`, under `iteration`; empty before it."""

_logged: set[tuple[object, ...]] = set()
"""Failures that `log_failure` has logged."""


def launched_rank() -> int:
    """Return this process's rank as torchrun (RANK) or srun (SLURM_PROCID) gives it; else 0.

    For what is logged before, or without, a process group.
    """
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


@functools.cache
def warn_once(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Log `message` (by default as a warning) the first time that this process passes it."""
    logger.log(level, message)


def warn_once_per_job(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Like `warn_once`, on rank 0 only: for what every rank finds."""
    if launched_rank() == 0:
        warn_once(logger, message, level)


def set_iteration(iteration: int) -> None:
    """Name the iteration that runs now in the failures that are logged from here on."""
    _current["iteration"] = iteration


def log_failure(logger: logging.Logger, what: str, error: Exception, where: str = "") -> str:
    """Log an exception that ends here, with traceback, rank and iteration; return it as one line.

    The same failure is logged once in a process: an exception of the same type that is raised at
    the same place in the code. Its text may differ, as in the bytes that CUDA could not allocate.

    A `SnipError` is not logged: its line is complete. A full disk or a folder without permission is
    logged without a traceback, because the code is not at fault, and is the same failure for every
    file.

    Args:
        logger: the logger of the module that stops the exception.
        what: what failed, such as `measuring`.
        error: the exception; called while it is handled.
        where: what it failed at first, such as a linear's name; the same failure at another one is
            not logged again.
    """
    line = f"{type(error).__name__}: {one_line(error)}"
    if not isinstance(error, SnipError):
        is_known = isinstance(error, OSError) and known_failure(error) is not None
        is_of_the_machine = is_known or isinstance(error, PermissionError)
        number = getattr(error, "errno", None)
        failure = (what, number) if is_of_the_machine else (what, type(error), _raised_at(error))
        if failure not in _logged:
            _logged.add(failure)
            _log(logger, f"{what} {where}".rstrip(), line, with_traceback=not is_of_the_machine)
    return line


def _raised_at(error: Exception) -> tuple[str, int] | None:
    """Return the file and the line that raised an exception; None if it was never raised."""
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    return places[-1] if places else None


def _log(logger: logging.Logger, what: str, line: str, with_traceback: bool) -> None:
    iteration = _current.get("iteration", 0)
    text = "snip: rank %d, iteration %d: %s failed: %s"
    logger.error(text, launched_rank(), iteration, what, line, exc_info=with_traceback or None)


def forget_warnings() -> None:
    """Let every message be logged again; for tests."""
    warn_once.cache_clear()
    _logged.clear()
