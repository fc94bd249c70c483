"""Lines that appear once: in this process, or in a job of many ranks."""

import functools
import logging
import os


@functools.cache
def warn_once(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Log `message` (by default as a warning) the first time that this process passes it."""
    logger.log(level, message)


def warn_once_per_job(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Like `warn_once`, on rank 0 only: for what every rank finds."""
    if int(os.environ.get("RANK", "0")) == 0:
        warn_once(logger, message, level)


forget_warnings = warn_once.cache_clear
"""Lets every message be logged again (in-process restart, tests)."""
