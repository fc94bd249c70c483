"""What all linears of a process share: iteration, precision, observer, quantized weights."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from megatron_snip.linears.quantized_linear import WeightCache
from megatron_snip.quantizers.stochastic import StochasticStream, grad_output_stream
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.topology import Placement, Topology
from megatron_snip.types import split_linear_name


@dataclass(frozen=True)
class MicrobatchTokens:
    """Tokens of a microbatch, over all ranks that share it.

    Attributes:
        read: what a language model reads, of a T5 its decoder; None if the number varies or is not
            known.
        encoder: what an encoder reads; None if that is the same number.
        evaluation: the tokens of an evaluation's microbatch; None if they are the same.
    """

    read: int | None = None
    encoder: int | None = None
    evaluation: Self | None = None

    def of_linear(self, name: str) -> int | None:
        """Return the tokens that enter a linear that is not an expert's, by the linear's name.

        Linears of the encoder of a T5, and the decoder's linears that multiply the encoder's
        output, have the encoder's tokens.
        """
        block, _, module = split_linear_name(name)
        reads_encoder = block == "encoder" or module == "cross_attention.linear_kv"
        return self.encoder if reads_encoder and self.encoder is not None else self.read


UNKNOWN_TOKENS = MicrobatchTokens()
"""Of microbatches that vary, or that nothing is known of."""


@dataclass(eq=False)
class Runtime:
    """Shared state of all planned linears of a process; the controller writes, linears read.

    Attributes:
        topology: this rank's place.
        seed: the run's seed.
        tokens: of a microbatch.
        iteration: Megatron's iteration, 1-based.
        in_bf16: names of the linears that run in BF16, whatever their option; None: all.
        observer: watches every linear's forward and backward, or None.
    """

    topology: Topology
    seed: int
    tokens: MicrobatchTokens = UNKNOWN_TOKENS
    iteration: int = 0
    in_bf16: frozenset[str] | None = frozenset()
    observer: StepObserver | None = None
    _weights: dict[str, WeightCache] | None = None
    _num_backwards: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def training_pass(self, iteration: int) -> Iterator[None]:
        """Run an iteration's forward-backward inside the block; microbatches count from 0 again.

        Each weight is quantized once for all microbatches (again if it changes), and once for
        fprop and dgrad if both agree in format and block. Memory until the end of the block: what
        the simulated GEMM multiplies, 4 bytes per weight on the CPU and 2 on a GPU.
        """
        self.iteration = iteration
        self._num_backwards.clear()
        self._weights = {}
        try:
            yield
        finally:
            self._weights = None

    def restart_pass(self) -> None:
        """Start the training pass anew: Megatron repeats it, and drops what it has done so far."""
        self._num_backwards.clear()
        if self._weights is not None:
            self._weights = {}
        if self.observer is not None:
            self.observer.restart()

    @contextmanager
    def observed_by(self, observer: StepObserver) -> Iterator[None]:
        """Let `observer` watch every linear inside the block; how they run does not change."""
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None

    def runs_in_bf16(self, name: str) -> bool:
        """Return whether a linear runs in BF16, whatever its option."""
        return self.in_bf16 is None or name in self.in_bf16

    @contextmanager
    def running_in_bf16(self, names: frozenset[str] | None = None) -> Iterator[None]:
        """Run linears in BF16 inside the block: those of these names, or all."""
        self.in_bf16 = names
        try:
            yield
        finally:
            self.in_bf16 = frozenset()

    def weight_cache(self, placement: Placement) -> WeightCache | None:
        """Return the quantized forms of a weight in this training pass; None outside of one."""
        if self._weights is None:
            return None
        return self._weights.setdefault(placement.instance, {})

    def next_stream(self, placement: Placement, first_row: int = 0) -> StochasticStream:
        """Return the random numbers of a weight's next backward.

        Backwards of a training pass come in the order of the microbatches.

        Args:
            placement: which weight.
            first_row: the index of the backward's first token within the microbatch.
        """
        local_microbatch = self._num_backwards[placement.instance]
        self._num_backwards[placement.instance] += 1
        data = self.topology.data_axis(placement)
        microbatch = local_microbatch * data.size + data.rank
        return grad_output_stream(self.seed, placement, self.iteration, microbatch, first_row)
