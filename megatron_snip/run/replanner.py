"""Replanner: gives the solver a problem when a new plan is needed.

after a refresh                       the controller passes what was measured to `submit`
before the target changes             `plan_for_new_target`, from the measurements so far; again
                                      `--snip-interval` iterations after a failure
at a resume with other settings       `resume`, from the checkpoint's measurements
at a resume while the solver worked   `resume`, the stopped run's problem again
"""

from functools import partial

from megatron_snip.errors import PlanningError
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.run.current_plan import CurrentPlan
from megatron_snip.run.healing import healing_problem, heals_in_order
from megatron_snip.run.observation import Observations
from megatron_snip.run.plans import FirstPlan, PlanSource, RunPlans
from megatron_snip.run.schedule import RefreshSchedule
from megatron_snip.run.solve import PendingProblem, Solve
from megatron_snip.run.state import ControllerState
from megatron_snip.topology import Topology


class Replanner:
    """Decides what the solver works on; all ranks call every method together.

    Attributes:
        target: the target of the last planning problem; before the first problem, the target of
            the plan that the run starts with. A new plan is made when the target schedule has
            another target. None: a new target makes no plan yet, because the policy needs
            measurements and there are none.
    """

    def __init__(
        self,
        plans: RunPlans,
        schedule: RefreshSchedule,
        observations: Observations,
        solve: Solve,
        current: CurrentPlan,
        topology: Topology,
    ) -> None:
        """Start before the first iteration, with nothing to solve.

        Args:
            plans: the options and targets of the run's plans.
            schedule: when the run measures and plans.
            observations: what was measured.
            solve: what gets the problems.
            current: the current plan.
            topology: this rank's place.
        """
        self._config = plans.config
        self._plans = plans
        self._schedule = schedule
        self._observations = observations
        self._solve = solve
        self._current = current
        self._control = topology.control
        self.target: float | None = None
        if schedule.plans_without_statistics or observations.mean is not None:
            self.target = current.plan.target
        # The target for which the solver failed last, and when it is planned for again.
        self._failed: tuple[float | None, int] = (None, 0)

    def resume(self, state: ControllerState, first: FirstPlan) -> None:
        """All ranks: plan for new settings, or solve the stopped run's problem again.

        Args:
            state: the state of the stopped run.
            first: the plan that this run starts with.

        Raises:
            SnipError: on every rank, if there is no problem to solve.
        """
        # A plan that the policy made at this start has a target of its own.
        if first.source is not PlanSource.POLICY and None not in (self.target, state.target):
            self.target = state.target
        if first.is_outdated:
            if self._observations.suffice():
                self._plan_before_first_iteration(state.iteration)
        elif first.source is PlanSource.CHECKPOINT and state.solve is not None:
            pending = self._plans.fitting.pending(state.solve, state.iteration)
            self._solve.load_state_dict(pending, self._current.plan)

    def _plan_before_first_iteration(self, num_done: int) -> None:
        """All ranks: plan from the checkpoint's measurements; training waits for the plan."""
        target = self._plans.targets.at(num_done + 1)
        make = partial(self._observations.measurement, target)
        problem = self._control.attempt("planning for the new settings", make).problem
        problem = self._plans.fitting.problem(problem)
        self.submit(num_done, problem, apply_at=num_done + 1)

    def plan_for_new_target(self, iteration: int) -> None:
        """All ranks: if the target is about to change, plan anew from the measurements so far."""
        target = self._plans.targets.at(iteration + self._config.lag)
        if self.target is None or self.target == target:
            return
        failed, again_at = self._failed
        if target == failed and iteration < again_at:
            return
        if self._solve.is_under_way or not self._schedule.may_plan_for_new_target(iteration):
            return
        # After a resume with other formats the measurements may lack them: the next refresh plans.
        if not self._schedule.plans_without_statistics and not self._observations.suffice():
            return
        self.target = target  # also if planning fails: it is not tried again

        def make() -> PlanningProblem:
            if self._schedule.plans_without_statistics:
                return self._plans.problem_without_measurements(target)
            return self._observations.measurement(target).problem

        with self._current.kept_on_error(iteration):
            problem = self._control.attempt("planning anew", make)
            self.submit(iteration, self._plans.fitting.problem(problem))

    def take_plan(self, iteration: int) -> tuple[PrecisionPlan, float]:
        """All ranks: return the solver's plan, and the seconds that training waited for it.

        Args:
            iteration: the iteration before which the plan is due.

        Raises:
            PlanningError: the same on every rank, if there is no plan. If no refresh comes before,
                the target is planned for again `interval` iterations later.
        """
        try:
            return self._solve.take_plan()
        except PlanningError:
            self.plan_later(iteration)
            raise

    def plan_later(self, iteration: int) -> None:
        """All ranks: after a failure, plan for the same target again `interval` iterations later.

        Args:
            iteration: the iteration before which the plan was due.
        """
        self._failed = (self.target, iteration + self._config.interval)
        self.target = self._current.plan.target

    def drop(self) -> None:
        """All ranks: forget what is being solved; call it before a revert replaces the plan.

        A target that only the dropped problem had is planned for again.
        """
        if self._solve.is_under_way:
            self._solve.drop()
            self.target = self._current.plan.target

    def submit(self, iteration: int, problem: PlanningProblem, apply_at: int | None = None) -> None:
        """All ranks: give a problem to the solver.

        Args:
            iteration: the iteration after which the solver gets it.
            problem: the problem. While the run heals, it is restricted to plans that heal in order.
            apply_at: before which iteration the plan is applied; by default `lag` iterations later.
        """
        if apply_at is None:
            apply_at = iteration + self._config.lag
        self.target = problem.target
        plan = self._current.plan
        if heals_in_order(self._config, self._plans.targets, apply_at):
            fixed = self._plans.available.fixed
            problem = healing_problem(problem, plan, self._config, fixed)
        self._solve.submit(PendingProblem(iteration, apply_at, problem), plan)
