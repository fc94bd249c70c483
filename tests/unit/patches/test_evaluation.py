"""Evaluations run in the context that the controller gives, and their loss is noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_snip.patches import evaluation
from megatron_snip.patches.registry import Registry
from tests.unit.patches.fake_megatron import FakeController, FakeMegatron


def test_evaluation(fake: FakeMegatron) -> None:
    registry = Registry([evaluation.SEAM])
    registry.install({"--snip"})
    expected = ({"lm loss": 1.5}, None, False)
    assert fake.training.evaluate("step", "data", model="model") == expected

    noted: list[Any] = []
    controller = FakeController()
    registry.session.controller = controller  # type: ignore[assignment]
    registry.session.metrics = SimpleNamespace(evaluated=noted.append)  # type: ignore[assignment]
    assert fake.training.evaluate("step", "data", "model") == expected
    assert controller.told == ["evaluating", "evaluated"]
    assert noted == [{"lm loss": 1.5}]
