"""What a forward-backward leaves behind is undone, as often as asked."""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron_snip.linears.traces import Traces


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def test_streams_and_buffers_are_put_back_twice() -> None:
    model = torch.nn.BatchNorm1d(3)
    model.train()
    traces = Traces([model])
    wanted = draws()
    for _ in range(2):
        model(torch.randn(5, 3))
        assert model.num_batches_tracked != 0
        traces.restore()
        assert model.num_batches_tracked == 0
        assert torch.equal(model.running_mean, torch.zeros(3))
        assert draws() == wanted
