"""What a forward-backward changes is restored, more than once."""

import random

import numpy as np
import torch

from megatron_snip.linears.training_state import TrainingStateSnapshot


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
