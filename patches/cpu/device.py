"""Answers of `torch.cuda` on the CPU: device, streams, events, graphs, random numbers, memory.

The CUDA generator *is* the CPU generator, so that Megatron's RNG tracker forks a real stream.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch

from megatron_snip.patches.cpu import graphs


class _Timeline:
    """A CUDA stream or event. On the CPU all work has finished when a call returns."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, other: Any = None) -> None:
        return None

    wait_stream = wait_event = wait = synchronize = record = _nothing

    def record_event(self, event: Any = None) -> Any:
        return _Timeline() if event is None else event

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class _Generator:
    """The CPU's generator with the two methods that only CUDA's has.

    There they share a state with a graph. Here they copy it.
    """

    def graphsafe_get_state(self) -> torch.Generator:
        return torch.default_generator.clone_state()

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        torch.default_generator.set_state(state.get_state())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


class _Generators(Sequence[Any]):
    """`torch.cuda.default_generators`: the CPU's generator for every device or index."""

    def __getitem__(self, index: Any) -> Any:
        return _Generator()

    def __len__(self) -> int:
        return local_ranks()


def local_ranks() -> int:
    """Return the number of ranks on this machine; each reports a device of its own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def constant(value: Any) -> Callable[..., Any]:
    """Return a new function that returns `value` (dynamo rejects one object under two names)."""
    return lambda *args, **kwargs: value


def cuda_answers(capability: tuple[int, int]) -> dict[str, Any]:
    """Return the replacements for attributes of `torch.cuda`, by name."""
    stream = _Timeline()
    properties = SimpleNamespace(
        name="cpu", gcnArchName="", multi_processor_count=1, total_memory=8 << 30
    )
    properties.major, properties.minor = capability
    answers: dict[str, Any] = {
        # An index, as CUDA's; tensors.py makes the CPU of it.
        "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
        "current_stream": constant(stream),
        "default_stream": constant(stream),
        "is_current_stream_capturing": graphs.is_capturing,
        "CUDAGraph": graphs.CUDAGraph,
        "graph": graphs.graph,
        "graph_pool_handle": constant((0, 0)),
        "default_generators": _Generators(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_device_name": constant("cpu"),
        "get_device_properties": constant(properties),
        "get_device_capability": constant(capability),
        "memory_stats": lambda device=None: {},
        "Stream": _Timeline,
        "Event": _Timeline,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "_lazy_call": lambda call, **kwargs: call(),
        "_lazy_init": constant(None),
    }
    for name in (
        "set_device",
        "set_stream",
        "init",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
    ):
        answers[name] = constant(None)
    for name in ("allocated", "reserved"):
        answers[f"memory_{name}"] = constant(0)
        answers[f"max_memory_{name}"] = constant(0)
    for name in ("Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte", "Bool"):
        answers[f"{name}Tensor"] = getattr(torch, f"{name}Tensor")
    return answers
