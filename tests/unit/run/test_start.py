"""The state that a run starts with, and what is reported of its plan."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.run.guard import GuardState
from megatron_snip.run.plans import FirstPlan, PlanSource
from megatron_snip.run.start import first_change, first_state
from megatron_snip.run.state import RunState
from megatron_snip.statistics.records import StatisticsTable
from tests.unit.planning.build import plan_of
from tests.unit.run.build import FP8_JOB, GUARD, run_plans, state_of

BF16_PLAN = plan_of(["bf16", "bf16", "bf16"])
FIRST = plan_of(["fp8", "fp4", "fp4"])
NEXT = plan_of(["fp8", "fp8", "fp4"])
MEASURED = StatisticsTable(5, 2.0, ())


def started(
    plan: PrecisionPlan = FIRST,
    stopped: RunState | None = None,
    source: PlanSource = PlanSource.CHECKPOINT,
    **config: Any,
) -> RunState:
    plans = run_plans(**config)
    first = FirstPlan(plan, source)
    return first_state("id", stopped, first, 6, plans)


@pytest.mark.parametrize(
    ("plan", "former", "job", "config", "reported"),
    [
        # A new run: (linears that differ from what the job runs, whether the plan is resumed).
        (FIRST, None, {}, {}, (3, False)),
        (BF16_PLAN, None, {}, {}, None),
        (BF16_PLAN, None, {}, {"collect_only": True}, (0, False)),
        (plan_of(["fp8", "fp8", "bf16"]), None, FP8_JOB, {}, (0, False)),
        # A resumed run: compared with the stopped run's plan.
        (FIRST, FIRST, {}, {}, None),
        (FIRST, FIRST, {}, {"collect_only": True}, (0, True)),
        (FIRST, NEXT, {}, {}, (1, False)),
    ],
)
def test_a_first_plan_is_reported_unless_it_changes_nothing_and_others_follow(
    plan: PrecisionPlan,
    former: PrecisionPlan | None,
    job: dict[str, Any],
    config: dict[str, Any],
    reported: tuple[int, bool] | None,
) -> None:
    plans = run_plans(job=job, **config)
    stopped = None if former is None else state_of(former)
    first = FirstPlan(plan, PlanSource.CHECKPOINT)
    state = first_state("id", stopped, first, 6, plans)
    is_new = former is not None and former.digest != plan.digest
    assert state.history == (((7, plan.digest),) if is_new else ())
    assert first_change(state, stopped, plans) == reported


@pytest.mark.parametrize(
    ("policy", "measured", "former_target", "target"),
    [
        ("snip", True, None, 0.5),
        ("snip", True, 0.4, 0.4),
        ("snip", False, 0.4, None),
        ("last-blocks", False, None, 0.5),
    ],
)
def test_the_target_that_a_new_one_is_compared_with(
    policy: str, measured: bool, former_target: float | None, target: float | None
) -> None:
    plan = FIRST.model_copy(update={"target": 0.5})
    observations = MEASURED if measured else None
    stopped = replace(state_of(plan), observations=observations, target=former_target)
    assert started(plan, stopped, policy=policy).target == target


def test_a_plan_that_the_policy_makes_at_a_resume_has_a_target_of_its_own() -> None:
    """The stopped run's 0.75 is not that of the new plan, so the point at 0.75 needs a plan."""
    plan = FIRST.model_copy(update={"target": 0.5})
    stopped = replace(state_of(plan), target=0.75)
    state = started(plan, stopped, PlanSource.POLICY, policy="last-blocks")
    assert state.target == 0.5


def test_another_plan_at_a_resume_is_judged_against_the_stopped_runs() -> None:
    losses = GUARD.loss.model_copy(update={"watch": None})
    stopped = replace(state_of(NEXT), guard=GuardState(loss=losses))
    guard = started(FIRST, stopped).guard
    assert guard is not None and guard.is_judging
    assert guard.first_fallback is not None and guard.first_fallback.linears == NEXT.linears
    same = started(NEXT, stopped).guard
    assert same == stopped.guard
    assert started(FIRST, stopped, guard=False).guard is None
