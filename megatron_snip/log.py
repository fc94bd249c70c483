"""Warnings that appear once: in this process, or in a job of many ranks."""

from __future__ import annotations

import logging
import os
import threading

_logged: set[str] = set()
_lock = threading.Lock()


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log `message` as a warning the first time that this process passes it."""
    with _lock:
        if message in _logged:
            return
        _logged.add(message)
    logger.warning(message)


def warn_once_per_job(logger: logging.Logger, message: str) -> None:
    """Like `warn_once`, on rank 0 only: for what every rank finds."""
    if int(os.environ.get("RANK", "0")) == 0:
        warn_once(logger, message)


def forget_warnings() -> None:
    """Let every message be logged again (in-process restart, tests)."""
    with _lock:
        _logged.clear()
