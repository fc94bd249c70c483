"""One training step's forward-backward call, which can be run and, on replayed data, run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.utils import get_model_config

from megatron_snip.linears.replay import ReplayData
from megatron_snip.topology import Topology

ForwardBackward = Callable[..., list[dict[str, Any]]]
"""Megatron's forward-backward function (`get_forward_backward_func()`); keyword arguments only."""


@dataclass
class TrainingStep:
    """A forward-backward call, as Megatron is about to make it.

    Attributes:
        function: Megatron's schedule.
        kwargs: its keyword arguments, with `data_iterator`, `model`, `num_microbatches`.
        data: the step's data, replayable.
    """

    function: ForwardBackward
    kwargs: dict[str, Any]
    data: ReplayData = field(init=False)

    def __post_init__(self) -> None:
        self.data = ReplayData(self.kwargs["data_iterator"])

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks."""
        model = self.kwargs["model"]
        return list(model) if isinstance(model, list) else [model]

    def run(self) -> list[dict[str, Any]]:
        """Run the forward-backward on the step's data from its start."""
        return self.function(**{**self.kwargs, "data_iterator": self.data.from_start()})

    def grad_scale(self, topology: Topology) -> float:
        """Return the factor from a gradient in the backward to that of the batch-mean loss.

        It is 1 / (data ranks * loss scale): Megatron divides by microbatches itself. With
        `calculate_per_token_loss` it divides by the batch's tokens after the backward; they are
        counted here as if none were masked.
        """
        config = get_model_config(self.chunks[0])
        scale = float(topology.data.size)
        if config.grad_scale_func is not None:
            device = next(self.chunks[0].parameters()).device
            scale *= float(config.grad_scale_func(torch.ones(1, device=device)).item())
        if config.calculate_per_token_loss:
            samples = self.kwargs["micro_batch_size"] * self.kwargs["num_microbatches"]
            tokens = self.kwargs["seq_length"] * samples
            scale *= tokens / parallel_state.get_context_parallel_world_size()
        return 1.0 / scale


@contextmanager
def tolerating_non_finite() -> Iterator[None]:
    """Within: results that are NaN or infinite do not reach Megatron's rerun state machine.

    It would end the job, and the caller has another remedy; finite results are validated as ever.
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
