"""A step can run again: same microbatches, what it changed is restored; its loss and gradients."""

import math
import random
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.log import forget_warnings
from megatron_snip.run.step import (
    StepLoss,
    TrainingStep,
    gradients_are_finite,
    tolerating_non_finite,
)
from megatron_snip.topology import Topology

ALONE = Topology()


@pytest.fixture(autouse=True)
def everything_is_logged_again() -> None:
    forget_warnings()


def counting(size: int = 6) -> Iterator[dict[str, int]]:
    for number in range(size):
        yield {"number": number}


def schedule(data_iterator: Any, model: Any, num_microbatches: int) -> Any:
    """Read microbatches; like Megatron's scripts, put what is moved to the device into the dict."""
    chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    found = []
    for data in (each for each in chunks if each is not None):
        batches = [next(data) for _ in range(num_microbatches)]
        found.append([batch.pop("number") for batch in batches])
    return found


def step(data: Any, num_microbatches: int = 2) -> TrainingStep:
    kwargs = {"data_iterator": data, "model": object(), "num_microbatches": num_microbatches}
    return TrainingStep(schedule, kwargs)


def test_a_step_runs_again_on_the_same_microbatches() -> None:
    """Also where a rank reads no data, and with several chunks."""
    assert step(None).run() == []
    source = counting()
    training = step([source, None, counting()])
    assert training.run() == training.run() == [[0, 1], [0, 1]]
    assert next(source) == {"number": 2}  # nothing is read ahead
    too_short = step(counting(1))
    for _ in range(2):
        with pytest.raises(StopIteration):
            too_short.run()


def test_what_a_pass_moves_to_the_device_is_freed_with_it() -> None:
    """Text, and images, which Megatron-Bridge's steps replace inside of an object."""
    images = SimpleNamespace(pixel_values=torch.ones(2), image_grid_thw=None)
    microbatch = {"tokens": torch.ones(3), "visual_inputs": images, "attention_mask": None}
    on_device: list[weakref.ref[torch.Tensor]] = []

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        result = tensor.to("meta")  # stands for a GPU
        on_device.append(weakref.ref(result))
        return result

    def forward(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        batch["tokens"] = moved(batch["tokens"])
        fields = vars(batch["visual_inputs"])
        fields["pixel_values"] = moved(fields["pixel_values"])
        return []

    training = TrainingStep(forward, {"data_iterator": iter([microbatch]), "model": object()})
    for _ in range(2):
        training.run()
        assert all(tensor() is None for tensor in on_device)
    assert len(on_device) == 4
    assert images.pixel_values.device.type == "cpu"


@pytest.mark.parametrize("data", [None, counting(), [counting(), None]])
def test_a_step_that_runs_once_gets_the_loops_own_iterators(data: Any) -> None:
    given = []
    kwargs = {"data_iterator": data, "model": object()}
    training = TrainingStep(lambda **passed: given.append(passed) or [], kwargs, may_repeat=False)
    assert training.run() == []
    assert given == [kwargs] and given[0]["data_iterator"] is data
    with pytest.raises(AssertionError, match="were not kept"):
        training.run()


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


def test_the_largest_attention_logits_are_restored() -> None:
    """`--qk-clip` scales weights by them after the step."""
    module = torch.nn.Linear(2, 2)
    before = torch.tensor([1.0, 2.0])
    for value in (None, before):
        module.current_max_attn_logits = value
        snapshot = TrainingStateSnapshot([torch.nn.Sequential(module)])
        module.current_max_attn_logits = torch.tensor([math.nan, 150.0])
        snapshot.restore()
        assert module.current_max_attn_logits is value


@pytest.mark.parametrize("name", ["values", "loss_values", "correct_values"])
def test_losses_of_multi_token_prediction_are_restored_under_any_releases_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = {name: torch.ones(2), "reduce_group": None}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", tracker)
    snapshot = TrainingStateSnapshot([])
    tracker[name] += math.nan
    tracker["created since"] = torch.ones(2)
    snapshot.restore()
    assert torch.equal(tracker[name], torch.ones(2))
    assert torch.equal(tracker["created since"], torch.zeros(2))


@pytest.mark.parametrize(
    ("reports", "loss"),
    [
        ([[2.0, 1.0], [9.0, 3.0]], 2.75),  # (2 + 9) / (1 + 3) tokens
        ([2.0, 3.0], 2.5),  # means count alike
        ([[math.nan, 1.0], [9.0, 3.0]], math.nan),
        ([], None),
    ],
)
def test_microbatches_count_by_their_tokens(reports: list[Any], loss: float | None) -> None:
    results = [{"lm loss": torch.tensor(report)} for report in reports]
    assert StepLoss(results, ALONE).read() == pytest.approx(loss, abs=0.0, nan_ok=True)
    assert StepLoss([{}], ALONE).read() is None
    judged = [StepLoss(results, ALONE).read_judged(is_finite) for is_finite in (True, False)]
    assert judged[0] == pytest.approx(loss, abs=0.0, nan_ok=True)
    assert judged[1] is None if loss is None else math.isnan(judged[1])
    assert StepLoss([{}], ALONE).read_judged(False) is None


@pytest.mark.parametrize("report", ["no number", torch.empty(0), torch.ones(3, 2), None])
def test_a_report_that_cannot_be_read_is_no_loss(
    report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    results = [{"lm loss": torch.tensor([2.0, 1.0])}, {"lm loss": report}]
    assert StepLoss(results, ALONE).read() is None
    assert "reading the loss of a step failed" in caplog.text


def test_megatrons_own_check_does_not_see_a_nan_that_the_guard_judges() -> None:
    def validate(result: float) -> None:
        loss = torch.tensor(result)
        RerunStateMachine().validate_result(result=loss, rejection_func=rejected, message="loss")

    seen: list[float] = []

    def rejected(loss: torch.Tensor) -> bool:
        seen.append(float(loss))
        return False

    with tolerating_non_finite():
        for loss in (1.0, math.nan, math.inf, 2.0):
            validate(loss)
    validate(math.inf)
    assert seen == [1.0, 2.0, math.inf]


def test_an_empty_gradient_is_finite() -> None:
    """An optimizer's shard may hold nothing of a weight."""
    linear: Any = torch.nn.Linear(2, 2)
    linear.weight.main_grad = torch.empty(0)
    assert gradients_are_finite([linear])
    linear.bias.grad = torch.tensor([1.0, math.nan])
    assert not gradients_are_finite([linear])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_wherever_they_are(bad: float) -> None:
    linear: Any = torch.nn.Linear(2, 2)
    assert gradients_are_finite([linear])  # none yet
    linear.weight.grad = torch.ones(2, 2)
    linear.bias.main_grad = torch.tensor([1.0, 2.0])
    for gradient in (linear.weight.grad[1], linear.bias.main_grad):
        assert gradients_are_finite([linear])
        gradient[1] = bad
        assert not gradients_are_finite([linear])
        gradient[1] = 1.0
