"""How the guard runs one iteration, given the loss of each run and a check that refuses NaN."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunStateMachine

from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.run.guard import Guard, GuardState, Outcome
from megatron_snip.run.loss_monitor import WATCHED_ITERATIONS, LossMonitor
from megatron_snip.run.step import TrainingStep
from megatron_snip.topology import Topology
from tests.unit.planning.build import plan_of

PLAN = plan_of(["fp4-fp4-fp4"], iteration=5, objective=None, target=0.5)
FALLBACK = plan_of(["fp8-fp8-fp8"], iteration=2, objective=None, target=0.0)


class Run:
    """A judged iteration of a run with these losses, one for each forward-backward."""

    def __init__(self, *losses: float, num_spikes: int = 0) -> None:
        self.losses = list(losses)
        self.applied: list[Any] = []
        self.chunk = torch.nn.Linear(2, 1)
        runtime = SimpleNamespace(topology=Topology(), training_pass=lambda _: nullcontext())
        model: Any = SimpleNamespace(
            runtime=runtime, apply=self.applied.append, gather_weights=lambda _: None
        )
        optimizer = torch.optim.SGD(self.chunk.parameters())
        self.guard = Guard(model, optimizer, lambda *_: None)
        monitor = LossMonitor(recent=(2.0,) * 20).after_plan_change(6.0)
        for _ in range(num_spikes):
            monitor = monitor.add(losses[0])
        self.state = GuardState(loss=monitor, first_fallback=FALLBACK)

    def iterate(self, plan: PrecisionPlan = PLAN) -> Outcome:
        kwargs = {"data_iterator": iter(range(9)), "model": [self.chunk]}
        step = TrainingStep(self._forward_backward, kwargs, self.state.is_judging)
        return self.guard.run(30, step, plan, self.state)

    def _forward_backward(self, **_: Any) -> list[dict[str, torch.Tensor]]:
        loss = torch.tensor(self.losses.pop(0))
        RerunStateMachine().validate_result(loss, rejection_func=torch.isnan, message="found NaN")
        return [{"lm loss": loss}]


@pytest.fixture(autouse=True)
def check_for_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own, without the rank and the device that it names."""

    def validate(self: Any, result: Any, rejection_func: Any, message: str) -> None:
        if rejection_func(result):
            raise RuntimeError(message)

    monkeypatch.setattr(RerunStateMachine, "validate_result", validate)


def test_a_fallback_that_gives_nan_does_not_end_a_job_whose_plan_gave_a_number() -> None:
    run = Run(9.0, math.nan, 9.0)
    outcome = run.iterate()
    assert outcome.num_runs == 3 and outcome.fallback is None
    assert "keeping the plan" in (outcome.message or "")
    assert run.applied[-1] == PLAN.linears


def test_a_lasting_rise_does_not_blame_the_plan_if_the_fallback_gives_nan() -> None:
    """Its gradients would reach the weights."""
    outcome = Run(9.0, math.nan, 9.0, num_spikes=9).iterate()
    assert outcome.num_runs == 3 and outcome.fallback is None
    assert Run(9.0, 9.0, num_spikes=9).iterate().fallback is FALLBACK


def test_a_loss_that_is_no_spike_is_added() -> None:
    run = Run(2.25)
    outcome = run.iterate()
    assert outcome.was_judged and outcome.guard == run.state.after_loss(2.25)
    run.state = GuardState(loss=LossMonitor(recent=(2.0,) * 20))
    run.losses = [2.25]
    outcome = run.iterate()
    assert not outcome.was_judged and outcome.guard is run.state
    assert outcome.loss is not None and outcome.loss.read() == 2.25


def test_a_plan_is_judged_good_at_the_end_of_its_watch() -> None:
    state = Run().state.model_copy(update={"num_reverted": 1})
    for _ in range(WATCHED_ITERATIONS - 1):
        state = state.after_loss(2.0)
    assert state.is_judging and state.num_reverted == 1
    state = state.after_loss(2.0)
    assert not state.is_judging and state.num_reverted == 0
    assert state.after_loss(None) is state


def test_one_refresh_follows_the_first_of_a_series_of_reverts() -> None:
    once = Run().state.after_revert(PLAN, FALLBACK, 30, 6.0)
    assert PLAN.digest in once.refused and once.first_fallback is FALLBACK
    assert (once.num_reverted, once.refresh_at) == (1, 31)
    twice = once.after_revert(plan_of(["fp4-fp8-fp8"]), FALLBACK, 40, 6.0)
    assert (twice.num_reverted, twice.refresh_at) == (2, None)


def test_a_change_during_a_series_of_spikes_keeps_the_fallback() -> None:
    other = plan_of(["fp4-fp8-fp8"])
    assert Run().state.after_plan_change(other, 6.0).first_fallback is other
    assert Run(9.0, num_spikes=1).state.after_plan_change(other, 6.0).first_fallback is FALLBACK


def test_without_a_fallback_only_a_loss_that_is_nan_runs_again() -> None:
    """So that Megatron's own check sees it."""
    run = Run(9.0)
    run.state = GuardState(loss=run.state.loss)
    outcome = run.iterate()
    assert (outcome.num_runs, outcome.fallback) == (1, None)
    assert "no other plan to fall back to" in (outcome.message or "")
    assert outcome.guard is not None and not outcome.guard.is_judging
    run = Run(math.nan, math.nan)
    run.state = GuardState(loss=run.state.loss)
    with pytest.raises(RuntimeError, match="found NaN"):
        run.iterate()


def test_a_loss_that_is_nan_under_both_plans_is_left_to_megatron() -> None:
    with pytest.raises(RuntimeError, match="found NaN"):
        Run(math.nan, math.nan).iterate()
