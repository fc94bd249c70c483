"""Chooses layouts: one launch of ranks runs those of the selected tests, and no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def names(layouts: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """Return values for `pytest.mark.parametrize`; all but `fast` are marked slow."""
    chosen = set(fast)
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.slow) for n in layouts]


def selected(request: pytest.FixtureRequest, layouts: Mapping[str, T]) -> dict[str, T]:
    """Return the layouts that the selected tests of a fixture's module have as a parameter."""
    wanted = {
        value
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
        for value in getattr(getattr(item, "callspec", None), "params", {}).values()
    }
    return {name: value for name, value in layouts.items() if name in wanted}
