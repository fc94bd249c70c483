"""Measuring passes that fail: who can be saved, and what counts as a lack of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_snip.linears.careful import CarefulPasses, StrandedError, out_of_memory
from megatron_snip.statistics.refresh import PassResult
from megatron_snip.topology import TensorAxis, Topology

ALONE = Topology()
TENSOR = Topology(tensor=TensorAxis(rank=0, size=2))
PIPELINE = Topology(num_stages=2)
ENTANGLED = Topology(entangled=2)
OOM = torch.OutOfMemoryError("tried to allocate\n20 GiB")


class Observer:
    failure: str | None = None


class Passes:
    num_microbatches, grad_scale = 3, 0.5

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def run(self, observer: Any) -> PassResult:
        if self._error is not None:
            raise self._error
        return PassResult(2.0, 1)


def run(error: Exception | None, topology: Topology) -> tuple[PassResult, str | None]:
    passes: Any = Passes(error)
    observer: Any = Observer()
    careful = CarefulPasses(passes, topology)
    assert (careful.num_microbatches, careful.grad_scale) == (3, 0.5)
    return careful.run(observer), observer.failure


def test_what_goes_well_passes_through() -> None:
    assert run(None, PIPELINE) == (PassResult(2.0, 1), None)


@pytest.mark.parametrize(
    ("error", "topology", "text"),
    [
        (ValueError("a bug"), ALONE, "ValueError: a bug"),
        (OOM, ALONE, "OutOfMemoryError: tried to allocate 20 GiB"),
        (OOM, TENSOR, "OutOfMemoryError: tried to allocate 20 GiB"),
    ],
)
def test_a_failure_that_leaves_nobody_waiting_is_noted(
    error: Exception, topology: Topology, text: str
) -> None:
    assert run(error, topology) == (PassResult(0.0, 0), text)


@pytest.mark.parametrize(
    ("error", "topology"),
    [
        (ValueError("a bug"), TENSOR),
        (ValueError("x"), PIPELINE),
        (OOM, PIPELINE),
        (ValueError("x"), ENTANGLED),
        (OOM, ENTANGLED),
    ],
)
def test_a_failure_that_strands_peers_ends_the_rank(error: Exception, topology: Topology) -> None:
    with pytest.raises(StrandedError, match="other ranks wait") as raised:
        run(error, topology)
    assert "\n" not in str(raised.value)


def test_the_first_failure_is_kept() -> None:
    passes: Any = Passes(ValueError("later"))
    observer: Any = Observer()
    observer.failure = "earlier"
    CarefulPasses(passes, ALONE).run(observer)
    assert observer.failure == "earlier"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a linear: OutOfMemoryError: {OOM}", True),
        ("RuntimeError: CUDA out of memory. Tried", True),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("MemoryError: ", True),
        ("RuntimeError: a bug", False),
    ],
)
def test_lack_of_memory_is_recognized(text: str, expected: bool) -> None:
    assert out_of_memory([text]) is expected
    assert out_of_memory(["a bug", text]) is expected
