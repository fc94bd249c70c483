"""Quantized weights, made once a training step and kept for its microbatches and passes.

Weights change between steps, so what is kept lives from the first use in a step's
forward-backward to the next optimizer step, and no longer:

    opened by     the beginning of a training forward-backward (`Runtime.begin_pass`)
    closed by     any step of a torch optimizer (its hook runs before the step, so that the memory
                  is free during it), a measuring pass (it may perturb weights), `close`
    forgotten     single weights, when they are another tensor, lie elsewhere or were written in
                  place (torch's version counter), as by loading a checkpoint

While closed (evaluation, a model called outside of training) nothing is kept: a weight is
quantized at every use. Writing through `.data` moves no version counter; whoever does so between
a step's forward and its optimizer step calls `close`.

Memory: `native` 1 byte a weight for fprop and 1 for dgrad (the transposed bytes) and 4 bytes a
128 x 128 block; `simulate` what its GEMM multiplies, 4 bytes a weight on the CPU and 2 on a GPU,
once where fprop and dgrad agree in format and block, else twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Sized(Protocol):
    """Something whose bytes can be counted."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


T = TypeVar("T", bound=Sized)
Form = Callable[[Hashable, Callable[[], T]], T]
"""(what form of a weight, how to make it) -> the form, made now or kept."""


@dataclass(frozen=True)
class _Kept:
    identity: tuple[int, int]
    form: Any


class KeptWeights:
    """The quantized weights of a process's linears; see the file's description."""

    def __init__(self) -> None:
        """Start closed."""
        self._open = False
        self._kept: dict[tuple[Hashable, Hashable], _Kept] = {}
        _listen()
        _STORES.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return sum(kept.form.nbytes for kept in self._kept.values())

    def open(self) -> None:
        """Forget everything, and keep from now on."""
        self._kept.clear()
        self._open = True

    def close(self) -> None:
        """Forget everything, and keep nothing until the next `open`."""
        self._kept.clear()
        self._open = False

    def get(
        self, owner: Hashable, form: Hashable, weight: torch.Tensor, make: Callable[[], T]
    ) -> T:
        """Return a form of a weight.

        Args:
            owner: whose weight it is, e.g. the linear's instance.
            form: which form: format, layout, dtype.
            weight: what `make` reads.
            make: quantizes.
        """
        if not self._open:
            return make()
        identity = (weight.data_ptr(), weight._version)
        found = self._kept.get((owner, form))
        if found is None or found.identity != identity:
            found = self._kept[owner, form] = _Kept(identity, make())
        kept: T = found.form
        return kept


_STORES: weakref.WeakSet[KeptWeights] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _listen() -> None:
    """Hear of every optimizer's steps, once a process."""
    register_optimizer_step_pre_hook(_optimizer_steps)


def _optimizer_steps(*_: Any) -> None:
    for store in list(_STORES):
        store.close()
