"""The end of a step: Megatron's value is kept, the step is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator

from megatron_snip.patches import step_end
from megatron_snip.patches.registry import Registry
from megatron_snip.patches.step_metrics import StepMetrics
from megatron_snip.topology import Topology
from tests.unit.patches.fake_megatron import FakeController, FakeMegatron

OPTIMIZER = SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": 0.3}, {"lr": None}])


@pytest.fixture
def attached(fake: FakeMegatron, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(num_microbatches_calculator, "get_current_global_batch_size", lambda: 4)
    registry = Registry([step_end.SEAM])
    registry.install({"--snip"})
    controller, metrics = FakeController(), StepMetrics(Topology())
    registry.session.controller = controller  # type: ignore[assignment]
    registry.session.metrics = metrics
    return fake, controller, metrics


def end_step(fake: Any, iteration: int) -> Any:
    return fake.training.post_training_step_callbacks(
        "model", OPTIMIZER, "scheduler", iteration, None, 41.0
    )


def test_the_step_is_counted_from_0_and_megatrons_value_is_kept(attached: Any) -> None:
    fake, controller, metrics = attached
    metrics.begin()
    metrics.trained({"lm loss": torch.tensor(2.0)}, 1.5)
    assert end_step(fake, 6) == 42.0
    kind, step, values = controller.told[0]
    assert (kind, step) == ("end", 5)
    assert values["loss"] == 2.0 and values["grad_norm"] == 1.5 and values["lr"] == 0.3
    assert values["tokens_per_s"] > 0


def test_losses_are_fetched_at_megatrons_interval(attached: Any) -> None:
    fake, controller, metrics = attached
    for iteration in (1, 2, 3, 4):
        metrics.trained({"lm loss": torch.tensor(2.0)}, 1.5)
        end_step(fake, iteration)
    assert ["loss" in values for _, _, values in controller.told] == [False, True, False, True]


def test_without_a_controller_nothing_happens(fake: FakeMegatron) -> None:
    Registry([step_end.SEAM]).install({"--snip"})
    assert end_step(fake, 1) == 42.0
