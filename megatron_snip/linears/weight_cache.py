"""Quantized weights of the current training step, shared by its microbatches.

Weights change between steps. So an entry lives from its first use in a step's forward-backward to
the next optimizer step, and no longer:

    open          at the beginning of a training forward-backward (`Runtime.begin_pass`)
    close         by any step of a torch optimizer (a hook runs before the step, so the memory is
                  free during it), or by `close`
    recomputed    a single weight, when its memory is another one or was written in place (torch's
                  version counter), as by loading a checkpoint

While closed (evaluation, a model called outside of training) nothing is cached. Writing through
`.data` does not change the version counter; code that does so between a step's forward and its
optimizer step must call `close`.

Memory: what the simulated GEMM multiplies, 4 bytes per weight on the CPU and 2 on a GPU; once if
fprop and dgrad agree in format and block, else twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class QuantizedWeightCache:
    """The quantized weights of a process's linears; see the file's description."""

    def __init__(self) -> None:
        """Start closed."""
        self._open = False
        self._entries: dict[Hashable, tuple[tuple[int, int], Tensor]] = {}
        _register_hook()
        _CACHES.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes in the cache."""
        return sum(quantized.nbytes for _, quantized in self._entries.values())

    def open(self) -> None:
        """Empty the cache, and use it from now on."""
        self._entries.clear()
        self._open = True

    def close(self) -> None:
        """Empty the cache, and cache nothing until the next `open`."""
        self._entries.clear()
        self._open = False

    def get(self, key: Hashable, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return a quantized weight.

        Args:
            key: linear, format, block, dtype.
            weight: what `make` reads.
            make: quantizes.
        """
        if not self._open:
            return make()
        version = (weight.data_ptr(), weight._version)
        entry = self._entries.get(key)
        if entry is None or entry[0] != version:
            entry = self._entries[key] = (version, make())
        return entry[1]


_CACHES: weakref.WeakSet[QuantizedWeightCache] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _register_hook() -> None:
    """Close all caches before every optimizer's step; once per process."""
    register_optimizer_step_pre_hook(_before_optimizer_step)


def _before_optimizer_step(*_: Any) -> None:
    for cache in list(_CACHES):
        cache.close()
