"""What trains an iteration: the controller, or `PlainTraining` without SNIP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_snip.controller import SnipController
from megatron_snip.reporting.events import Event, Metrics, Reporter, Writer

ForwardBackward = Callable[..., list[dict[str, Any]]]
"""Megatron's forward-backward function (`get_forward_backward_func()`); keyword arguments only."""


class PlainTraining:
    """The controller's interface for training without SNIP; metrics go to the writers."""

    lowest_precision_fraction = 0.0

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._reporter = Reporter(writers)

    def forward_backward(
        self, iteration: int, function: ForwardBackward, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Call Megatron's function."""
        return function(**kwargs)

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def end_iteration(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Report the metrics."""
        self._reporter.write(
            Event(iteration, Metrics({**metrics, "lowest_precision_fraction": 0.0}))
        )

    def state(self, iteration: int) -> None:
        """A checkpoint keeps nothing."""

    def close(self) -> None:
        """Close the writers."""
        self._reporter.close()


TrainingHook = SnipController | PlainTraining
