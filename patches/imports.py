"""Runs something when a module has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(module: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` now if a module is imported, else right after it has been.

    Returns:
        A function that forgets the action if it has not run.
    """
    if module in sys.modules:
        action()
        return lambda: None
    watch = _Watch(module, action)
    sys.meta_path.insert(0, watch)
    return watch.end


class _Watch(MetaPathFinder, Loader):
    """Finds one module where it is, runs it, and then the action.

    It watches until the module has run: others may look for the module without importing it
    (`importlib.util.find_spec`), or try again after an import that failed.
    """

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module = module
        self._action = action

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        self.end()  # or this search would come here again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module sees its own loader, as if nobody had watched.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self.end()
        self._action()
