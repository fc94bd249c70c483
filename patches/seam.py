"""Seam: one function of Megatron's that SNIP wraps, and what the wrapper does.

A wrapper takes `*args, **kwargs`, binds them to the original's own signature where it needs one by
name, calls the original and returns its value. Nothing of the original is repeated.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target

Function = Callable[..., Any]
Wrap = Callable[[Function, Session], Function]
"""Makes the wrapper of an original; the session is what all wrappers of a process share."""

When = Literal["always", "--snip", "--cpu"]
"""What a seam is installed for."""


@dataclass(frozen=True)
class Seam:
    """What is wrapped, when, and by what.

    Attributes:
        name: short, for lists and messages.
        purpose: what SNIP does there, in a few words.
        target: the function.
        wrap: makes the wrapper.
        when: what it is installed for.
        optional: not every release has the function, and those that have not need no seam.
    """

    name: str
    purpose: str
    target: Target
    wrap: Wrap
    when: When = "--snip"
    optional: bool = False


def wrapping(original: Function) -> Callable[[Function], Function]:
    """Decorator of a wrapper: it looks like `original`, and `original` is its `__wrapped__`."""
    return functools.wraps(original)


def bound(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bind a call to `original`'s signature; `.arguments` holds what was given, by name.

    Raises:
        TypeError: as the call itself would.
    """
    return inspect.signature(original).bind(*args, **kwargs)
