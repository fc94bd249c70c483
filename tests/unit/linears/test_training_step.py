"""A step can run again: on the same microbatches, and what it changed is restored."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_snip.linears.training_state import TrainingStateSnapshot
from megatron_snip.linears.training_step import ReplayableIterator, TrainingStep


def counting(taken: list[int]) -> Iterator[dict[str, int]]:
    for number in range(6):
        taken.append(number)
        yield {"number": number}


def schedule(data_iterator: Any, model: Any, num_microbatches: int) -> Any:
    chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    return [
        [next(data)["number"] for _ in range(num_microbatches)]
        for data in chunks
        if data is not None
    ]


def step(data: Any, num_microbatches: int = 2) -> TrainingStep:
    kwargs = {"data_iterator": data, "model": object(), "num_microbatches": num_microbatches}
    return TrainingStep(schedule, kwargs)


def test_ranks_without_data_and_several_chunks() -> None:
    assert step(None).run() == []
    training = step([counting([]), None, counting([])])
    assert training.run() == training.run() == [[0, 1], [0, 1]]


def test_a_reader_that_changes_its_microbatch_does_not_change_the_next_one() -> None:
    """Megatron's scripts put what they move to the device back into the dict."""
    data = ReplayableIterator(counting([]))
    first = next(data)
    first["number"] = 99
    data.rewind()
    assert next(data) == {"number": 0}


def test_the_end_of_the_data_is_passed_on() -> None:
    data = ReplayableIterator(iter([1]))
    assert next(data) == 1
    with pytest.raises(StopIteration):
        next(data)
    data.rewind()
    assert next(data) == 1


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def test_random_numbers_and_buffers_are_restored_twice() -> None:
    model = torch.nn.BatchNorm1d(3)
    model.train()
    snapshot = TrainingStateSnapshot([model])
    wanted = draws()
    for _ in range(2):
        model(torch.randn(5, 3))
        assert model.num_batches_tracked != 0
        snapshot.restore()
        assert model.num_batches_tracked == 0
        assert torch.equal(model.running_mean, torch.zeros(3))
        assert draws() == wanted
