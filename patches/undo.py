"""Undo: attributes that are set for a while, and the very objects that were there before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_ABSENT = object()


class Undo:
    """Remembers every attribute it sets, with the very object that was there before."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` and remember what was there."""
        self._entries.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a function by `wrapper(function)`."""
        self.set(owner, name, wrapper(getattr(owner, name)))

    def restore(self) -> None:
        """Put everything back, last first; an attribute that someone else replaced stays."""
        while self._entries:
            owner, name, before, ours = self._entries.pop()
            now = vars(owner).get(name, _ABSENT)
            if now is not ours:
                logger.warning("%s.%s was replaced by someone else; left as it is", owner, name)
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
