"""What all linears of a process share: iteration, precision, observer, weight cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_snip.linears.weight_cache import QuantizedWeightCache
from megatron_snip.quantizers.stochastic import StochasticStream, grad_output_stream
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.topology import Placement, Topology


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
