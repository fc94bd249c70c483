from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaRNGStatesTracker:
    """Named RNG states that a block can be run under."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Any] = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Delayed scaling alone keeps anything for recomputation; the stand-in has none."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    return False
