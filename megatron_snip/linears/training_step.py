"""One training step's forward-backward call, which can be run and, on the same data, run again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.utils import get_model_config

from megatron_snip.topology import Topology

Results = list[dict[str, Any]]
"""What Megatron's forward-backward function returns."""

ForwardBackward = Callable[..., Results]
"""Megatron's forward-backward function (`get_forward_backward_func()`); keyword arguments only."""


class ReplayableIterator(Iterator[Any]):
    """An iterator over `source` that can be rewound to where it started.

    Each reader gets its own (shallow) copy of a microbatch, because Megatron's scripts replace
    what they move to the device in it. Nothing is read ahead.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._taken: list[Any] = []
        self._next = 0

    def __next__(self) -> Any:
        """Return the next microbatch, recorded or new."""
        if self._next == len(self._taken):
            self._taken.append(next(self._source))
        item = self._taken[self._next]
        self._next += 1
        return copy.copy(item)

    def rewind(self) -> None:
        """Start again from the first microbatch taken."""
        self._next = 0


@dataclass
class TrainingStep:
    """A forward-backward call, as Megatron is about to make it.

    Megatron gives a data iterator only to the ranks that read data (None to others) and one for
    each model chunk under interleaved pipelines.

    Attributes:
        function: Megatron's schedule.
        kwargs: its keyword arguments, with `data_iterator`, `model`, `num_microbatches`.
    """

    function: ForwardBackward
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        given = self.kwargs["data_iterator"]
        sources = given if isinstance(given, list) else [given]
        self._data = [None if source is None else ReplayableIterator(source) for source in sources]

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks."""
        model = self.kwargs["model"]
        return list(model) if isinstance(model, list) else [model]

    def run(self) -> Results:
        """Run the forward-backward on the step's data from its start."""
        for iterator in self._data:
            if iterator is not None:
                iterator.rewind()
        several = isinstance(self.kwargs["data_iterator"], list)
        data = list(self._data) if several else self._data[0]
        return self.function(**{**self.kwargs, "data_iterator": data})

    def clear_gradients(self, optimizer: Any) -> None:
        """Zero the gradients of a run that does not count."""
        for chunk in self.chunks:
            zero: Any = getattr(chunk, "zero_grad_buffer", None)
            if zero is not None:
                zero()
        optimizer.zero_grad()

    def loss_scale(self) -> float:
        """Return the factor of mixed precision that the loss is multiplied by."""
        scale = get_model_config(self.chunks[0]).grad_scale_func
        if scale is None:
            return 1.0
        one = torch.ones(1, device=next(self.chunks[0].parameters()).device)
        return float(scale(one).item())

    def grad_scale(self, topology: Topology) -> float:
        """Return the factor from a gradient in the backward to that of the batch-mean loss.

        It is 1 / (data ranks * loss scale): Megatron divides by microbatches itself. With
        `calculate_per_token_loss` it divides by the batch's tokens after the backward; they are
        counted here as if none were masked.
        """
        config = get_model_config(self.chunks[0])
        scale = topology.data.size * self.loss_scale()
        if config.calculate_per_token_loss:
            samples = self.kwargs["micro_batch_size"] * self.kwargs["num_microbatches"]
            tokens = self.kwargs["seq_length"] * samples
            scale *= tokens / parallel_state.get_context_parallel_world_size()
        return 1.0 / scale


@contextmanager
def tolerating_non_finite() -> Iterator[None]:
    """Within, NaN and infinite results are not passed to Megatron's rerun state machine.

    It would end the job, and the caller can recover; finite results are validated as usual.
    """
    machine = getattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is None:
        yield
        return
    validate = machine.validate_result

    def validate_finite(result: Any, *args: Any, **kwargs: Any) -> None:
        if bool(torch.isfinite(torch.as_tensor(result)).all()):
            validate(result, *args, **kwargs)

    machine.validate_result = validate_finite
    try:
        yield
    finally:
        del machine.validate_result
