"""Which problem the solver gets, when, and for which target."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.collectives import Control
from megatron_snip.errors import PlanningError
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting.events import Event, Reporter
from megatron_snip.run.current_plan import CurrentPlan
from megatron_snip.run.plans import FirstPlan, PlanSource
from megatron_snip.run.replanner import Replanner
from megatron_snip.run.schedule import RefreshSchedule
from megatron_snip.run.solve import PendingProblem, Solve
from megatron_snip.topology import Topology
from tests.unit.planning.build import plan_of, problem_of
from tests.unit.run.build import run_plans, state_of

PLAN = plan_of(["fp8", "fp8", "fp4"], target=0.5)
PROBLEM = problem_of([[0.0, 1.0]] * 3)
CHANGING: dict[str, Any] = {
    "target_schedule": "0:0.5,50:0.75",
    "interval": 1000,
    "start_step": 10,
    "lag": 2,
}


class Solver:
    """Stands for the solver's process; keeps what it gets."""

    def __init__(self) -> None:
        self.given: list[tuple[PlanningProblem, PrecisionPlan, int]] = []

    def submit(
        self, problem: PlanningProblem, settings: PlanSettings, plan: PrecisionPlan, iteration: int
    ) -> None:
        self.given.append((problem, plan, iteration))

    def result(self, timeout_s: float) -> PrecisionPlan:
        raise PlanningError("the solver was killed")


class Run:
    """A replanner of one rank, its solver, and the notices of the run.

    Args:
        measured: whether something was measured.
        suffices: whether the measurements suffice for a plan.
        fails: whether measurements make no problem.
        former_target: `target` of a stopped run that is resumed; None in a new run.
        config: settings.
    """

    def __init__(
        self,
        measured: bool = True,
        suffices: bool = True,
        fails: bool = False,
        former_target: float | None = None,
        **config: Any,
    ) -> None:
        def measurement(target: float) -> SimpleNamespace:
            if fails:
                raise PlanningError("no problem")
            return SimpleNamespace(problem=PROBLEM.model_copy(update={"target": target}))

        observations: Any = SimpleNamespace(
            mean=object() if measured else None, suffice=lambda: suffices, measurement=measurement
        )
        self.solver: Any = Solver()
        self.notices: list[Event] = []
        writer: Any = SimpleNamespace(write=self.notices.append)
        plans = run_plans(**config)
        model: Any = SimpleNamespace()
        current = CurrentPlan(PLAN, model, plans, Reporter([writer]))
        schedule = RefreshSchedule(plans.config)
        schedule.begin(plans.config.start_step)  # the first refresh has ended
        self.solve = Solve(PlanSettings(), Control(), self.solver)
        self.replanner = Replanner(plans, schedule, observations, self.solve, current, Topology())
        if former_target is not None:
            stopped = replace(state_of(PLAN), target=former_target)
            self.replanner.resume(stopped, FirstPlan(PLAN, PlanSource.CHECKPOINT))

    @property
    def pending(self) -> tuple[int, int, float] | None:
        """(iteration, apply_at, target) of what the solver works on."""
        found = self.solve.state_dict()
        return found and (found.iteration, found.apply_at, found.problem.target)


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
    run = Run(measured=measured, former_target=former_target, policy=policy)
    assert run.replanner.target == target


@pytest.mark.parametrize("policy", ["snip", "last-blocks"])
def test_a_new_target_is_planned_for_once_so_that_its_plan_is_in_time(policy: str) -> None:
    run = Run(policy=policy, **CHANGING)
    for iteration in range(11, 48):
        run.replanner.plan_for_new_target(iteration)
    assert run.pending is None
    run.replanner.plan_for_new_target(48)
    assert run.pending == (48, 50, 0.75) and run.replanner.target == 0.75
    run.solve.drop()  # its plan was applied
    run.replanner.plan_for_new_target(49)
    assert run.pending is None


@pytest.mark.parametrize("policy", ["snip", "last-blocks"])
def test_after_a_revert_a_new_target_whose_problem_was_dropped_is_planned_for_again(
    policy: str,
) -> None:
    run = Run(policy=policy, **CHANGING)
    run.replanner.plan_for_new_target(48)
    run.replanner.drop()
    assert run.pending is None and run.replanner.target == PLAN.target
    run.replanner.plan_for_new_target(49)
    assert run.pending == (49, 51, 0.75)


def test_a_target_whose_solve_failed_is_planned_for_again_after_the_interval() -> None:
    """Without measurements no refresh plans for it."""
    run = Run(policy="last-blocks", **CHANGING)
    run.replanner.plan_for_new_target(48)
    with pytest.raises(PlanningError, match="no plan for the problem of iteration 48"):
        run.replanner.take_plan(50)
    assert run.replanner.target == 0.5  # a resumed run plans for 0.75 at once
    for iteration in range(50, 1050):
        run.replanner.plan_for_new_target(iteration)
    assert run.pending is None
    run.replanner.plan_for_new_target(1050)
    assert run.pending == (1050, 1052, 0.75)


def test_after_a_revert_without_a_problem_nothing_is_planned() -> None:
    run = Run(former_target=0.75, **CHANGING)
    run.replanner.drop()
    run.replanner.plan_for_new_target(60)
    assert run.pending is None


def test_without_measurements_a_policy_that_needs_them_plans_for_no_new_target() -> None:
    run = Run(measured=False, **CHANGING)
    run.replanner.plan_for_new_target(48)
    assert run.pending is None and not run.notices


def test_a_new_target_waits_for_measurements_in_the_formats_of_the_run() -> None:
    run = Run(suffices=False, former_target=0.5, **CHANGING)
    run.replanner.plan_for_new_target(48)
    assert run.pending is None and run.replanner.target == 0.5 and not run.notices
    run = Run(suffices=False, former_target=0.5, policy="last-blocks", **CHANGING)
    run.replanner.plan_for_new_target(48)
    assert run.pending == (48, 50, 0.75)


def test_a_new_target_waits_while_another_problem_is_solved() -> None:
    run = Run(**CHANGING)
    run.replanner.submit(47, PROBLEM.model_copy(update={"target": 0.5}))
    run.replanner.plan_for_new_target(48)
    assert run.pending == (47, 49, 0.5)


def test_planning_for_a_new_target_that_fails_is_reported_and_not_tried_again() -> None:
    run = Run(fails=True, **CHANGING)
    for iteration in (48, 49):
        run.replanner.plan_for_new_target(iteration)
    (event,) = run.notices
    assert event.iteration == 48 and "no problem" in event.payload.message  # type: ignore[union-attr]


def test_the_problem_of_a_refresh_is_due_after_the_lag() -> None:
    run = Run(lag=3)
    run.replanner.submit(20, PROBLEM.model_copy(update={"target": 0.6}))
    assert run.pending == (20, 23, 0.6) and run.replanner.target == 0.6
    ((_, plan, iteration),) = run.solver.given
    assert plan is PLAN and iteration == 20


def test_a_plan_that_the_policy_makes_at_a_resume_has_a_target_of_its_own() -> None:
    """The stopped run's 0.75 is not that of the new plan, so the point at 0.75 needs a plan."""
    run = Run(policy="last-blocks", **CHANGING)
    stopped = replace(state_of(PLAN), target=0.75)
    run.replanner.resume(stopped, FirstPlan(PLAN, PlanSource.POLICY))
    run.replanner.plan_for_new_target(48)
    assert run.pending == (48, 50, 0.75)


@pytest.mark.parametrize("suffices", [True, False])
def test_new_settings_are_planned_for_before_the_first_iteration(suffices: bool) -> None:
    run = Run(suffices=suffices)
    first = FirstPlan(PLAN, PlanSource.CHECKPOINT, new_settings=frozenset({"pins"}))
    run.replanner.resume(state_of(PLAN), first)
    assert run.pending == ((6, 7, 0.75) if suffices else None)


def test_with_the_same_settings_the_stopped_runs_problem_is_solved_again() -> None:
    for source, expected in ((PlanSource.CHECKPOINT, (5, 7, 0.5)), (PlanSource.FILE, None)):
        run = Run(lag=2)
        problem = PROBLEM.model_copy(update={"target": 0.5})
        stopped = PendingProblem(iteration=5, apply_at=7, problem=problem)
        state = replace(state_of(PLAN), solve=stopped)
        run.replanner.resume(state, FirstPlan(PLAN, source))
        assert run.pending == expected
