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
from megatron_snip.run.loss_monitor import LossMonitor
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
        self.guard = Guard(6.0, model, optimizer, lambda *_: None)
        monitor = LossMonitor(recent=(2.0,) * 20).after_plan_change(6.0)
        for _ in range(num_spikes):
            monitor = monitor.add(losses[0])
        self.guard.load_state_dict(GuardState(loss=monitor, first_fallback=FALLBACK))

    def iterate(self, plan: PrecisionPlan = PLAN) -> Outcome:
        """In the controller's order."""
        self.guard.begin(30)
        kwargs = {"data_iterator": iter(range(9)), "model": [self.chunk]}
        step = TrainingStep(self._forward_backward, kwargs, self.guard.is_judging)
        return self.guard.run(30, step, plan)

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


@pytest.mark.parametrize("is_judged", [False, True])
def test_an_iteration_that_megatron_repeats_counts_once(is_judged: bool) -> None:
    """With the loss of its last run; Megatron doubted the first one."""

    def states(*losses: float) -> GuardState:
        run = Run(*losses)
        if not is_judged:
            run.guard.load_state_dict(GuardState(loss=LossMonitor(recent=(2.0,) * 20)))
        for _ in losses:
            run.iterate()
        run.guard.read_loss()
        return run.guard.state

    assert states(2.25, 2.125) == states(2.125)


def test_a_repeated_iteration_is_judged_if_its_first_run_ended_the_watch() -> None:
    """Else its microbatches are not kept, and a spike in the repeated run ends the job."""
    run = Run(2.0, 9.0, 2.0)
    loss = run.guard.state.loss
    assert loss.watch is not None
    ending = loss.model_copy(update={"watch": loss.watch.model_copy(update={"left": 1})})
    run.guard.load_state_dict(GuardState(loss=ending, first_fallback=FALLBACK))
    assert run.iterate().fallback is None
    assert not run.guard.is_judging
    assert run.iterate().fallback is FALLBACK


def test_without_a_fallback_only_a_loss_that_is_nan_runs_again() -> None:
    """So that Megatron's own check sees it."""
    run = Run(9.0)
    run.guard.load_state_dict(GuardState(loss=run.guard.state.loss))
    outcome = run.iterate()
    assert (outcome.num_runs, outcome.fallback) == (1, None)
    assert "no other plan to fall back to" in (outcome.message or "")
    assert not run.guard.is_judging
    run = Run(math.nan, math.nan)
    run.guard.load_state_dict(GuardState(loss=run.guard.state.loss))
    with pytest.raises(RuntimeError, match="found NaN"):
        run.iterate()


def test_a_loss_that_is_nan_under_both_plans_is_left_to_megatron() -> None:
    with pytest.raises(RuntimeError, match="found NaN"):
        Run(math.nan, math.nan).iterate()
