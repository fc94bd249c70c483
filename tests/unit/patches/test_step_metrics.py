"""A step's metrics, put together."""

from __future__ import annotations

import math

import torch

from megatron_snip.patches.step_metrics import StepMetrics
from megatron_snip.topology import Topology


def test_a_step_with_and_without_the_loss() -> None:
    metrics = StepMetrics(Topology())
    metrics.begin()
    metrics.trained({"lm loss": torch.tensor(2.5), "aux": torch.tensor(9.0)}, 1.25)
    values = metrics.finish(lr=0.1, tokens=64, log_losses=True)
    assert values.pop("tokens_per_s") > 0
    assert values == {"loss": 2.5, "grad_norm": 1.25, "lr": 0.1}

    metrics.begin()
    metrics.trained({"lm loss": torch.tensor(2.0)}, torch.tensor(1.0))
    values = metrics.finish(lr=None, tokens=64, log_losses=False)
    assert set(values) == {"grad_norm", "tokens_per_s"}


def test_an_evaluation_is_told_once() -> None:
    metrics = StepMetrics(Topology())
    metrics.trained({"lm loss": torch.tensor(2.0)}, None)
    metrics.evaluated({"lm loss": torch.tensor(3.0)})
    values = metrics.finish(lr=None, tokens=1, log_losses=False)
    assert values["validation_loss"] == 3.0 and "loss" not in values
    metrics.trained({"lm loss": torch.tensor(2.0)}, None)
    assert "validation_loss" not in metrics.finish(lr=None, tokens=1, log_losses=True)


def test_what_no_rank_knows_is_nan() -> None:
    metrics = StepMetrics(Topology())
    metrics.trained({}, None)
    metrics.evaluated(None)  # Megatron's time limit struck during the evaluation
    values = metrics.finish(lr=None, tokens=1, log_losses=True)
    assert math.isnan(values["loss"]) and math.isnan(values["validation_loss"])
