"""Logging helpers: one logger a module, warnings that are said once per process."""

from __future__ import annotations

import logging
import threading

_said: set[str] = set()
_lock = threading.Lock()


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log `message` as a warning the first time this process sees it; later calls are silent."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    logger.warning(message)


def forget_warnings() -> None:
    """Let every `warn_once` message be said again (in-process restart, tests)."""
    with _lock:
        _said.clear()
