"""What all linears of a process share: iteration, precision, observer, weight cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_snip.quantizers.stochastic import StochasticStream, grad_output_stream
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.topology import Placement, Topology


class QuantizedWeightCache:
    """Quantized weights of the current training step, shared by its microbatches.

    Weights change between steps. So an entry lives from its first use in a step's forward-backward
    to the next optimizer step, and no longer:

        open          at the beginning of a training forward-backward (`Runtime.begin_pass`)
        close         by any step of a torch optimizer (a hook runs before the step, so the memory
                      is free during it), or by `close`
        recomputed    a single weight, when its memory is another one or was written in place
                      (torch's version counter), as by loading a checkpoint

    While closed (evaluation, a model called outside of training) nothing is cached. Writing through
    `.data` does not change the version counter; code that does so between a step's forward and its
    optimizer step must call `close`.

    Memory: what the simulated GEMM multiplies, 4 bytes per weight on the CPU and 2 on a GPU; once
    if fprop and dgrad agree in format and block, else twice.
    """

    def __init__(self) -> None:
        """Start closed."""
        self._entries: dict[Hashable, tuple[tuple[int, int], Tensor]] | None = None
        _register_hook()
        _CACHES.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes in the cache."""
        return sum(quantized.nbytes for _, quantized in (self._entries or {}).values())

    def open(self) -> None:
        """Empty the cache, and use it from now on."""
        self._entries = {}

    def close(self) -> None:
        """Empty the cache, and cache nothing until the next `open`."""
        self._entries = None

    def get(self, key: Hashable, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return a quantized weight.

        Args:
            key: linear, format, block, dtype.
            weight: what `make` reads.
            make: quantizes.
        """
        if self._entries is None:
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


@dataclass(eq=False)
class Runtime:
    """Shared state of all planned linears of a process; the controller writes, linears read.

    Attributes:
        topology: this rank's place.
        seed: the run's seed.
        microbatch_tokens: of all ranks that share a microbatch; None if they vary or are unknown.
        iteration: Megatron's, 1-based.
        pass_number: number of training passes begun, repeats of a step included.
        in_bf16: whether linears run as Megatron runs them, whatever their option.
        observer: watches every linear's forward and backward, or None.
        weight_cache: quantized weights of the current training pass.
    """

    topology: Topology
    seed: int
    microbatch_tokens: int | None = None
    iteration: int = 0
    pass_number: int = 0
    in_bf16: bool = False
    observer: StepObserver | None = None
    weight_cache: QuantizedWeightCache = field(default_factory=QuantizedWeightCache)

    def begin_pass(self, iteration: int) -> None:
        """Begin a training forward-backward of an iteration; microbatches count from 0 again."""
        self.iteration = iteration
        self.pass_number += 1
        self.weight_cache.open()

    @contextmanager
    def observed_by(self, observer: StepObserver) -> Iterator[None]:
        """Let `observer` watch every linear inside the block; how they run does not change."""
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None

    @contextmanager
    def running_in_bf16(self) -> Iterator[None]:
        """Run linears as Megatron runs them inside the block."""
        self.in_bf16 = True
        try:
            yield
        finally:
            self.in_bf16 = False

    def stream(self, placement: Placement, local_microbatch: int) -> StochasticStream:
        """Return the random numbers of a linear's grad_output in the current iteration."""
        data = self.topology.data_axis(placement)
        microbatch = local_microbatch * data.size + data.rank
        return grad_output_stream(self.seed, placement, self.iteration, microbatch)
