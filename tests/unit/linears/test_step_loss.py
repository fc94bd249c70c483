"""The loss of a step from what Megatron's schedules report, old form and new; finite gradients."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_snip.linears.step_loss import StepLoss, finite_gradients
from megatron_snip.topology import Topology

ALONE = Topology()


def loss(*reports: Any) -> float | None:
    return StepLoss([{"lm loss": report} for report in reports], ALONE).value()


def test_microbatches_count_by_their_tokens() -> None:
    # (2 + 9) / (1 + 3)
    assert loss(torch.tensor([2.0, 1.0]), torch.tensor([9.0, 3.0])) == 2.75


def test_means_count_alike() -> None:
    assert loss(torch.tensor(2.0), torch.tensor(3.0)) == 2.5


def test_nan_stays_and_nothing_is_none() -> None:
    value = loss(torch.tensor([math.nan, 1.0]), torch.tensor([9.0, 3.0]))
    assert value is not None and math.isnan(value)
    assert StepLoss([], ALONE).value() is None
    assert StepLoss([{}], ALONE).value() is None


def model(fp16: bool = False) -> Any:
    linear: Any = torch.nn.Linear(2, 2)
    linear.config = SimpleNamespace(fp16=fp16)
    return linear


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_wherever_they_are(bad: float) -> None:
    linear = model()
    assert finite_gradients([linear], ALONE)  # none yet
    linear.weight.grad = torch.ones(2, 2)
    linear.bias.main_grad = torch.tensor([1.0, 2.0])
    assert finite_gradients([linear], ALONE)
    linear.bias.main_grad[1] = bad
    assert not finite_gradients([linear], ALONE)
    linear.bias.main_grad[1] = 0.0
    linear.weight.grad[0, 1] = bad
    assert not finite_gradients([linear], ALONE)


def test_with_fp16_an_overflow_is_the_loss_scalers_business() -> None:
    linear = model(fp16=True)
    linear.weight.grad = torch.full((2, 2), math.inf)
    assert finite_gradients([linear], ALONE)
