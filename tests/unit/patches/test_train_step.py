"""The training step's seam: order of calls, everything passed through."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_snip.patches import train_step
from megatron_snip.patches.registry import Registry
from tests.unit.patches.fake_megatron import FakeController, FakeMegatron


class Metrics:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self) -> None:
        self.told.append("begin")

    def trained(self, losses: Any, grad_norm: Any) -> None:
        self.told.append((losses, grad_norm))


def schedule(**kwargs: Any) -> str:
    return f"ran {sorted(kwargs)}"


ARGUMENTS = ("step_func", "data", "model", "optimizer", "scheduler", "config")


@pytest.fixture
def attached(fake: FakeMegatron) -> tuple[FakeMegatron, FakeController, Metrics]:
    registry = Registry([train_step.SEAM])
    registry.install({"--snip"})
    controller, metrics = FakeController(), Metrics()
    registry.session.controller = controller  # type: ignore[assignment]
    registry.session.metrics = metrics  # type: ignore[assignment]
    return fake, controller, metrics


def test_the_plan_is_applied_before_and_the_schedule_runs_inside(attached: Any) -> None:
    fake, controller, metrics = attached
    result = fake.training.train_step(*ARGUMENTS, schedule, iteration=7)
    assert controller.told == [("begin", 7), ("forward-backward", 7)]
    assert result == (
        {"lm loss": "ran ['data_iterator', 'model']"},
        0,
        False,
        False,
        0,
        2.5,
        None,
        0,
    )
    assert metrics.told == ["begin", (result[0], 2.5)]


def test_a_repeated_schedule_goes_through_the_controller_each_time(attached: Any) -> None:
    fake, controller, _ = attached
    fake.repeats = 3
    fake.training.train_step(*ARGUMENTS, schedule, iteration=7)
    assert controller.told == [("begin", 7)] + [("forward-backward", 7)] * 3


def test_arguments_by_keyword_and_new_ones_pass_through(attached: Any) -> None:
    fake, controller, _ = attached
    keywords = dict(zip(("forward_step_func", "data_iterator"), ARGUMENTS[:2], strict=True))
    rest = {
        "model": 1,
        "optimizer": 2,
        "opt_param_scheduler": 3,
        "config": 4,
        "forward_backward_func": schedule,
        "iteration": 2,
        "pg_collection": "groups",
    }
    fake.training.train_step(**keywords, **rest)
    assert controller.told[0] == ("begin", 2)


def test_without_an_iteration_megatrons_own_counter_tells(attached: Any) -> None:
    fake, controller, _ = attached
    fake.training.train_step(*ARGUMENTS, schedule)
    assert controller.told[0] == ("begin", fake.args.curr_iteration)


def test_an_aborted_step_passes_through(attached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rerun state machine ends a step without losses and norm."""
    fake, _, metrics = attached
    registry = Registry([train_step.SEAM])
    aborted = ({}, True, True, True, 16, None, None, 0)

    def original(forward_backward_func: Any, iteration: int) -> Any:
        return aborted

    monkeypatch.setattr(fake.training, "train_step", original)
    registry.install({"--snip"})
    registry.session.controller = FakeController()  # type: ignore[assignment]
    registry.session.metrics = metrics
    assert fake.training.train_step(schedule, 3) is aborted
    assert metrics.told[-1] == ({}, None)


def test_without_a_controller_the_call_is_megatrons(fake: FakeMegatron) -> None:
    Registry([train_step.SEAM]).install({"--snip"})
    assert fake.training.train_step(*ARGUMENTS, schedule)[5] == 2.5
