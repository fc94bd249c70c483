"""When a new plan is asked for: functions from a run's state to its next state.

after a refresh                       its problem (`with_problem`)
before the target changes             a problem from the measurements so far (`target_to_plan_for`);
                                      again `--snip-interval` iterations after a failure
after a revert                        a problem that is being solved is dropped

The problem is `RunState.solve`. The controller gives it to the solver.
"""

from collections.abc import Callable
from dataclasses import replace

from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.run.healing import healing_problem, heals_in_order
from megatron_snip.run.plans import RunPlans
from megatron_snip.run.solve import PendingProblem
from megatron_snip.run.state import FailedTarget, RunState


def target_to_plan_for(
    state: RunState,
    iteration: int,
    plans: RunPlans,
    suffices: Callable[[], bool],
) -> float | None:
    """Return the target of a plan that must be asked for now; None if none must be.

    Args:
        state: the run's state.
        iteration: the iteration that is about to run; it measures nothing.
        plans: the targets of the run's plans, and when the run plans.
        suffices: whether the measurements so far are enough for a plan. After a resume with other
            formats they may lack these: then the next refresh plans.
    """
    schedule = plans.schedule
    target = plans.targets_of(state).at(iteration + plans.config.lag)
    # With a problem at the solver, its plan comes first; the target is compared again after it.
    if state.target is None or state.target == target or state.solve is not None:
        return None
    # The same measurements would fail again: wait, unless the target moves on.
    failed = state.failed
    if failed is not None and failed.target == target and iteration < failed.again_at:
        return None
    # A refresh that begins before the plan would be due makes a better one.
    if not schedule.may_plan_for_new_target(state.schedule, iteration):
        return None
    if not schedule.plans_without_statistics and not suffices():
        return None
    return target


def with_problem(
    state: RunState,
    iteration: int,
    problem: PlanningProblem,
    plans: RunPlans,
    apply_at: int | None = None,
) -> RunState:
    """Return the state in which a problem is being solved.

    Args:
        state: the run's state.
        iteration: the iteration after which the solver gets the problem.
        problem: the problem. While the run heals, it is restricted to plans that heal in order.
        plans: the options and targets of the run's plans.
        apply_at: before which iteration the plan is applied; by default `lag` iterations later.
    """
    config = plans.config
    if apply_at is None:
        apply_at = iteration + config.lag
    target = problem.target
    if heals_in_order(config, plans.targets_of(state), apply_at):
        problem = healing_problem(problem, state.plan, config, plans.available.fixed)
    return replace(state, target=target, solve=PendingProblem(iteration, apply_at, problem))


def without_problem(state: RunState) -> RunState:
    """Return the state in which nothing is being solved.

    A target that only the dropped problem had is planned for again.
    """
    if state.solve is None:
        return state
    return replace(state, solve=None, target=state.plan.target)


def after_failed_plan(state: RunState, iteration: int, interval: int) -> RunState:
    """Return the state after the plan that was due before an iteration could not be had.

    Its target is planned for again `interval` iterations later, unless a refresh comes before.
    """
    failed = FailedTarget(state.target, iteration + interval)
    return replace(state, solve=None, target=state.plan.target, failed=failed)
