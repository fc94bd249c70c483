"""The printed model shows what each linear runs: `print(model)`.

A module without a `__repr__` of its own gets an `extra_repr` on the instance. Megatron's linears
have one of their own on the class, which Python looks up there; it is wrapped once, appends what
the instance says, and leaves instances that say nothing alone.

    ColumnParallelLinear(in_features=64, out_features=192, bias=False, TP=1) [snip fp4, native]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ATTRIBUTE = "_snip_describe"
_MARKER = "_snip_wrapped"


def show(module: torch.nn.Module, describe: Callable[[], str]) -> None:
    """Let a module print what `describe` returns; doing so again replaces it."""
    module.__dict__[_ATTRIBUTE] = describe
    if type(module).__repr__ is torch.nn.Module.__repr__:
        module.__dict__["extra_repr"] = _Extra(module)
    else:
        _wrap(type(module))


def hide(module: torch.nn.Module) -> None:
    """Undo `show`; nothing to do if it was not called."""
    module.__dict__.pop(_ATTRIBUTE, None)
    if isinstance(module.__dict__.get("extra_repr"), _Extra):
        del module.__dict__["extra_repr"]


class _Extra:
    """The class's own `extra_repr` and what the instance says."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(self) -> str:
        own = type(self._module).extra_repr(self._module)
        said = self._module.__dict__[_ATTRIBUTE]()
        return f"{own}, snip {said}" if own else f"snip {said}"


def _wrap(kind: Any) -> None:
    original = kind.__repr__
    if hasattr(original, _MARKER):
        return

    def with_option(self: Any) -> str:
        describe = self.__dict__.get(_ATTRIBUTE)
        text = str(original(self))
        return text if describe is None else f"{text} [snip {describe()}]"

    setattr(with_option, _MARKER, True)
    kind.__repr__ = with_option
