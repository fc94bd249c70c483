"""The state that a run starts with: new, or that of a stopped run; functions without effects."""

from dataclasses import replace
from typing import NamedTuple

from megatron_snip.options import BF16
from megatron_snip.planning.plan import PrecisionPlan, changed_linears
from megatron_snip.run.guard import GuardState
from megatron_snip.run.plans import FirstPlan, PlanSource, RunPlans
from megatron_snip.run.state import RunState


def first_state(
    run_id: str,
    stopped: RunState | None,
    first: FirstPlan,
    num_done: int,
    plans: RunPlans,
) -> RunState:
    """All ranks: return the state that a run starts with; nothing is being solved in it.

    Args:
        run_id: what identifies the run.
        stopped: the state of the stopped run; None for a new run.
        first: the plan that the run starts with.
        num_done: iterations that the weights were trained for.
        plans: when the run plans; makes plans of the stopped run fit this one.
    """
    plan = first.plan
    schedule = plans.schedule
    # A plan that never changes is not judged.
    is_guarded = plans.config.guard and schedule.changes_plans
    if stopped is None:
        guard = GuardState() if is_guarded else None
        # None: a new target makes no plan before something was measured.
        target = plan.target if schedule.plans_without_statistics else None
        return RunState(num_done, plan, run_id, target=target, guard=guard)
    history = stopped.history
    if stopped.plan.digest != plan.digest:
        history = (*history, (num_done + 1, plan.digest))
    # As for a new run: None makes no plan before something was measured.
    target = None
    if schedule.plans_without_statistics or stopped.observations is not None:
        # A plan that the policy made at this start has a target of its own.
        has_own = first.source is PlanSource.POLICY or not schedule.changes_plans
        target = plan.target if has_own or stopped.target is None else stopped.target
    return replace(
        stopped,
        iteration=num_done,
        plan=plan,
        run_id=run_id,
        history=history,
        target=target,
        solve=None,  # the controller asks again: the stopped run's problem must fit this run first
        guard=_guard(stopped, plan, plans) if is_guarded else None,
        alerts=tuple(sorted(stopped.alerts)),
        settings={},
    )


def _guard(stopped: RunState, plan: PrecisionPlan, plans: RunPlans) -> GuardState:
    """All ranks: return what the guard of a stopped run knows, for the plan of this run."""
    guard = stopped.guard or GuardState()
    if guard.first_fallback is not None:
        fitted, _ = plans.fitted(guard.first_fallback)
        guard = guard.model_copy(update={"first_fallback": fitted})
    if stopped.plan.digest == plan.digest:
        return guard
    # The new plan is judged. Its fallback is the stopped run's plan, made to fit this run. With new
    # pins or formats this fitted plan can equal the new plan. Then the fallback of the stopped run
    # stays.
    fitted, _ = plans.fitted(stopped.plan)
    fallback = guard.first_fallback if fitted.digest == plan.digest else fitted
    return guard.after_plan_change(fallback, plans.config.guard_sigmas)


class FirstChange(NamedTuple):
    """What the first plan of a run changes.

    Attributes:
        num_changed: linears that run another option than before: in the stopped run, or for a new
            run in the job itself.
        is_resumed: whether the stopped run had the same plan.
    """

    num_changed: int
    is_resumed: bool


def first_change(state: RunState, stopped: RunState | None, plans: RunPlans) -> FirstChange | None:
    """Return what the first plan changes, if a reader needs to know the plan; else None.

    Args:
        state: what `first_state` returned.
        stopped: the state of the stopped run; None for a new run.
        plans: what the job itself runs, and whether other plans may follow.
    """
    job = plans.available.job.options
    before = job if stopped is None else stopped.plan.linears
    num_changed = 0
    for name, option in state.plan.linears.items():
        num_changed += option != before.get(name, job[name])
    is_resumed = stopped is not None and stopped.plan.digest == state.plan.digest
    # A first plan that changes nothing is not reported if others follow. A report shows a run
    # without a plan as BF16, so a new run that starts with another precision reports it.
    starts_in_bf16 = set(state.plan.linears.values()) == {BF16}
    changes_nothing_yet = not num_changed and plans.schedule.changes_plans
    needs_no_report = changes_nothing_yet and (stopped is not None or starts_in_bf16)
    if needs_no_report and not state.history:
        return None
    return FirstChange(num_changed, is_resumed)


def differences(
    state: RunState,
    stopped: RunState | None,
    first: FirstPlan,
    plans: RunPlans,
    has_enough_measurements: bool,
) -> list[str]:
    """Return lines about what differs from the stopped run, or from the plan file.

    Args:
        state: what `first_state` returned.
        stopped: the state of the stopped run; None for a new run.
        first: the plan that the run starts with.
        plans: the settings that a resumed run reports.
        has_enough_measurements: whether the stopped run measured enough to plan from.
    """
    plan = state.plan
    settings = [] if stopped is None else stopped.changes(plans.reported_settings())
    if not settings:
        changes = (*first.changes, *plans.recipe_changes())
        return [f"{plan.label}: {text}" for text in changes]
    texts = [*settings, *first.changes]
    left = () if stopped is None else changed_linears(stopped.plan, plan)
    if left and first.source is not PlanSource.CHECKPOINT:
        options = dict.fromkeys(str(plan.linears[name]) for name in left)
        texts.append(
            f"{len(left)} of {len(plan.linears)} linears leave the checkpoint's plan and run "
            f"{', '.join(options)}"
        )
    if first.is_outdated and not has_enough_measurements:
        texts.append("the next refresh plans with them")
    return [f"this run resumes with other settings: {'; '.join(texts)}"]


def measures_nothing(plans: RunPlans) -> bool:
    """Return whether a run that should measure ends before its first refresh.

    With a plan file there is a plan to run, so a run without a measurement makes sense.
    """
    config = plans.config
    needs_measurements = config.collect_only or not plans.schedule.plans_without_statistics
    ends_before = plans.train_iters is not None and plans.train_iters < config.start_step
    return config.plan_file is None and needs_measurements and ends_before
