"""What SNIP sees of the training loop.

On every rank the loop calls, for each step and in this order:

    begin_step(step)                            before anything of the step
    forward_backward(step, function, ...)       in place of Megatron's forward-backward function
    evaluating()                                around an evaluation, where one is due
    end_step(step, metrics)                     after optimizer, scheduler and evaluation
    state(step + 1)                             where a checkpoint is written

and `close()` once, at the end or after a failure. `SnipController` is such a hook; `PlainHook` is
the one for training without SNIP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from megatron_snip.controller_state import ControllerState
from megatron_snip.reporting.reporter import Reporter

ForwardBackward = Callable[..., list[dict[str, Any]]]
"""Megatron's forward-backward function (`get_forward_backward_func()`); keyword arguments only."""


class TrainingHook(Protocol):
    """What the loop calls; see the module's text for the order. All ranks call all."""

    def begin_step(self, step: int) -> None:
        """Act between two steps; `step` (0-based) is about to begin."""

    def forward_backward(
        self, step: int, function: ForwardBackward, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Run the step's microbatches, with passes of one's own before if need be.

        Args:
            step: training step (0-based).
            function: Megatron's forward-backward function.
            kwargs: its keyword arguments.

        Returns:
            What `function` returns for the training pass.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which an evaluation runs."""

    def end_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Hear (and write) how the step went; see `loop.train` for the metrics."""

    def state(self, step: int) -> ControllerState | None:
        """Return what a checkpoint after `step` training steps keeps; the same on all ranks."""

    @property
    def lowest_precision_fraction(self) -> float:
        """Share of linear FLOPs in the lowest precision at this step, 0 to 1."""

    def close(self) -> None:
        """Let go of the model and end what was started."""


class PlainHook:
    """Training as Megatron does it; the metrics go to a reporter."""

    lowest_precision_fraction = 0.0

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def begin_step(self, step: int) -> None:
        """Nothing to do."""

    def forward_backward(
        self, step: int, function: ForwardBackward, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Call Megatron's function."""
        return function(**kwargs)

    def evaluating(self) -> AbstractContextManager[None]:
        """Nothing to change."""
        return nullcontext()

    def end_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Pass the metrics on."""
        fraction = self.lowest_precision_fraction
        self._reporter.metrics(step, {**metrics, "lowest_precision_fraction": fraction})

    def state(self, step: int) -> ControllerState | None:
        """Nothing to keep."""
        return None

    def close(self) -> None:
        """Close the reporter."""
        self._reporter.close()
