"""The plan that linears run: applied, replaced, kept, reported."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.collectives import RemoteFailure
from megatron_snip.errors import PlanningError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.events import Event, Notice, PlanApplied, Reporter
from megatron_snip.run.current_plan import CurrentPlan
from megatron_snip.topology import Topology
from tests.unit.planning.build import plan_of
from tests.unit.run.build import FP8_JOB, run_plans

BF16_PLAN = plan_of(["bf16", "bf16", "bf16"])
FIRST = plan_of(["fp8", "fp4", "fp4"])
NEXT = plan_of(["fp8", "fp8", "fp4"])


class Linears:
    """Stands for the planned linears; `refused` is a plan that they cannot run completely."""

    def __init__(self, refused: PrecisionPlan | None = None) -> None:
        self.runtime = SimpleNamespace(topology=Topology())
        self.options: Mapping[str, Option] = {}
        self._refused = refused

    def apply(self, options: Mapping[str, Option]) -> None:
        self.options = options
        if self._refused is not None and options == self._refused.linears:
            raise RuntimeError("no kernel")

    def resolved(self, plan: PrecisionPlan, iteration: int, fixed: Any) -> dict[str, Any]:
        return {}


class Events(list[Event]):
    """A writer that keeps events."""

    def write(self, event: Event) -> None:
        self.append(event)

    def close(self) -> None:
        pass


def current_plan(
    plan: PrecisionPlan = FIRST, refused: PrecisionPlan | None = None, **job: Any
) -> tuple[CurrentPlan, Linears, Events]:
    model: Any = Linears(refused)
    events = Events()
    return CurrentPlan(plan, model, run_plans(**job), Reporter([events])), model, events


@pytest.mark.parametrize(
    ("plan", "former", "job", "may_change", "reported"),
    [
        # A new run: (linears that differ from what the job runs, whether the plan is resumed).
        (FIRST, None, {}, True, (3, False)),
        (BF16_PLAN, None, {}, True, None),
        (BF16_PLAN, None, {}, False, (0, False)),
        (plan_of(["fp8", "fp8", "bf16"]), None, {"job": FP8_JOB}, True, (0, False)),
        # A resumed run: compared with the stopped run's plan.
        (FIRST, FIRST, {}, True, None),
        (FIRST, FIRST, {}, False, (0, True)),
        (FIRST, NEXT, {}, True, (1, False)),
    ],
)
def test_a_first_plan_is_reported_unless_it_changes_nothing_and_others_follow(
    plan: PrecisionPlan,
    former: PrecisionPlan | None,
    job: dict[str, Any],
    may_change: bool,
    reported: tuple[int, bool] | None,
) -> None:
    current, model, events = current_plan(plan, **job)
    current.start(former, num_done=6, may_change=may_change)
    assert model.options == plan.linears
    is_new = former is not None and former.digest != plan.digest
    assert current.history == ([(7, plan.digest)] if is_new else [])
    found = []
    for event in events:
        assert isinstance(event.payload, PlanApplied) and event.iteration == 7
        found.append((event.payload.num_changed, event.payload.resumed))
    assert found == ([] if reported is None else [reported])


def test_a_plan_that_cannot_be_applied_leaves_the_linears_as_they_were() -> None:
    current, model, events = current_plan(refused=NEXT)
    current.start(None, 0, may_change=True)
    with (
        current.kept_on_error(9),
        pytest.raises(RemoteFailure, match=r"applying the plan .*no kernel"),
    ):
        current.change(9, NEXT)
    assert model.options == FIRST.linears and current.plan is FIRST and current.history == []
    del events[:]
    with current.kept_on_error(9):
        raise PlanningError("no plan")
    (event,) = events
    assert event == Event(9, Notice("refresh_failed", f"keeping {FIRST.label}: no plan"))


def test_a_new_plan_is_reported_and_its_step_times_start_anew() -> None:
    current, model, events = current_plan()
    for _ in range(3):
        current.step_times.end_iteration({"step_s": 2.0})
    assert current.step_times.mean_s == 2.0
    applied = current.change(9, NEXT, waited_s=0.5, saving_s=0.1)
    assert model.options == NEXT.linears
    assert (applied.num_changed, applied.waited_s, applied.saving_s) == (1, 0.5, 0.1)
    assert events == [Event(9, applied)]
    assert current.plan is NEXT and current.history == [(9, NEXT.digest)]
    assert current.format_shares == applied.format_shares
    assert applied.format_shares == pytest.approx({"fp4": 0.5, "fp8": 0.5})
    assert current.step_times.mean_s is None
