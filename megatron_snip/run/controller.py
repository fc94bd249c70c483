"""The controller: an iteration takes the run's state and returns the next one.

All ranks make the same calls and hold the same state (`RunState`). In order:

    apply      a plan that is due: rank 0 checks and broadcasts it, or the reason why there is none;
               every rank applies it
    observe    if a refresh is due, the iteration is measured while it runs; at its end the
               statistics are summed over ranks
    run        the forward-backward, again under another plan if the guard demands it
    plan       after a refresh all ranks make a planning problem, and rank 0 gives it to the
               solver's process; its plan is due `lag` iterations later

If measuring, planning or applying fails on one rank, all ranks keep the current plan and continue,
and rank 0 warns. A new plan that makes the loss jump or NaN is reverted (guard.py).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_snip.collectives import RemoteFailure
from megatron_snip.config import SnipConfig
from megatron_snip.errors import PlanningError, SnipError
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import UNKNOWN_TOKENS, MicrobatchTokens
from megatron_snip.log import set_iteration
from megatron_snip.planning.fixed import by_source, summary
from megatron_snip.planning.plan import (
    PrecisionPlan,
    changed_linears,
    format_shares,
    without_objective,
)
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting.events import (
    Event,
    Measurement,
    Metrics,
    PlanApplied,
    Reporter,
    Settings,
    Writer,
)
from megatron_snip.reporting.precision_record import PrecisionRecord
from megatron_snip.run.alerts import new_alerts
from megatron_snip.run.evaluation import Evaluations
from megatron_snip.run.guard import Guard, Outcome
from megatron_snip.run.healing import begins_below_noise
from megatron_snip.run.observation import Observations, Refresh
from megatron_snip.run.plans import FirstPlan, PlanSource, RunPlans
from megatron_snip.run.replanning import (
    after_failed_plan,
    target_to_plan_for,
    with_problem,
    without_problem,
)
from megatron_snip.run.schedule import ScheduleState
from megatron_snip.run.solve import PendingProblem, Solver
from megatron_snip.run.start import differences, first_change, first_state, measures_nothing
from megatron_snip.run.state import RunState, state_of_model
from megatron_snip.run.step import ForwardBackward, Results, Runner, StepLoss, TrainingStep
from megatron_snip.run.step_times import StepTimes
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.topology import Topology

NUM_WATCHED = 10
"""Linears that dashboards have series of."""


class SnipController:
    """Drives SNIP in one training process; construct it on all ranks together.

    A training loop calls on every rank (iterations are counted from 1, as Megatron does):

        forward_backward    in each iteration, in place of its forward-backward function
        end_iteration       after each iteration and its evaluation
        evaluation          around each evaluation
        end_evaluation      after each evaluation. After the last iteration it adds what the
                            evaluation found to that iteration's metrics
        state               for each checkpoint
        close               at the end

    Attributes:
        config: the settings, with the formats that `auto` means here.
        model: the planned linears.
        evaluations: names the evaluations, and decides in which precision they run. With
            `--snip-eval-precision both` or `groups` it keeps the loss increase of each evaluation
            until an iteration's metrics are reported.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        *,
        seed: int = 0,
        writers: Sequence[Writer] = (),
        state: RunState | None = None,
        topology: Topology | None = None,
        solver: SolverProcess | None = None,
        tokens: MicrobatchTokens = UNKNOWN_TOKENS,
        calibration_cache: Path | None = None,
        train_iters: int | None = None,
        num_done: int = 0,
        run_id: str = "",
    ) -> None:
        """All ranks: attach to a built model, once its checkpoint is loaded.

        Args:
            config: the settings.
            model: Megatron's model chunks.
            optimizer: Megatron's optimizer.
            seed: seed of stochastic rounding, sampled tokens and the solver; the same on all ranks.
            writers: what records events; on the ranks that report.
            state: where to continue (`state()` of the stopped run); None starts a new run.
            topology: this rank's place in the parallel layout; by default Megatron's.
            solver: what solves on rank 0; by default a process of its own.
            tokens: samples of a microbatch times their length; by default they may vary.
            calibration_cache: a file of rank 0 that stores measured seconds for a resumed run.
            train_iters: the last iteration of the run; healing needs it.
            num_done: iterations that the weights were trained for; with a state, its iteration
                counts instead.
            run_id: what identifies the run, for its checkpoints; the same on all ranks.

        Raises:
            UsageError: on every rank, if the policy is unknown, a pin or the plan file does not
                fit the model, the plan file contradicts another setting, healing does not fit the
                run, or no plan reaches the target.
            UnsupportedError: on every rank, if the backend cannot run the model's linears or the
                lowest precision among the formats, or `--snip-cost time` cannot time them.
        """
        if state is not None:
            num_done = state.iteration
        # What the model is, what it can run, and under which settings.
        topology = current_topology() if topology is None else topology
        self.model = PlannedModel(model, topology, seed, config.backend, tokens)
        self._plans = RunPlans(config, self.model, train_iters, calibration_cache)
        self.config = self._plans.config
        self._schedule = self._plans.schedule

        # What follows may warn through the reporter. What was found above is reported here.
        self._control = topology.control
        self._reporter = Reporter(writers, logs=topology.rank == 0)
        for text in self._plans.available.warnings:
            self._reporter.warn(text)
        for text in self._plans.available.hints:
            self._reporter.log(text)
        fixed = self._plans.available.fixed
        if fixed:
            self._reporter.log(summary(fixed, len(self.model.job.linears)))
        if state is not None:
            state, warning = state_of_model(state, (each.name for each in self.model.job.linears))
            if warning is not None:
                self._reporter.warn(warning)

        # What runs and measures an iteration, solves, and evaluates. None of it knows the plan.
        self._observations = Observations(self.config, self.model, self._plans.available, optimizer)
        self._optimizer = optimizer
        self._guard = Guard(self.model, optimizer, self._plans.job_fallback)
        if topology.rank != 0 or not self._schedule.changes_plans:
            solver = None
        elif solver is None:
            solver = SolverProcess()
        self._solver = Solver(self._plans.plan_settings(seed), topology.control, solver)
        self.evaluations = Evaluations(
            self.config.eval_precision,
            self.model,
            self._reporter,
            lambda plan: self._observations.loss_divergence(self._state.observations, plan),
            num_done,
        )
        if measures_nothing(self._plans):
            self._reporter.warn(
                f"nothing will be measured: --snip-start-step is {self.config.start_step}, and the "
                f"run has {train_iters} iterations"
            )
        self.evaluations.log_cost()
        self.evaluations.warn_if_a_plan_cannot_run(self._plans.available.options)

        # The plan that the run starts with, and the rest of a stopped run's state.
        first = self._plans.first_plan(state, seed, num_done)
        self._state = first_state(run_id, state, first, num_done, self._plans)
        # The iteration that began last, and the state before it. Iterations are counted from 1.
        self._begun = 0
        self._before = self._state
        # The loss of the last iteration that was not judged, on its way from the device.
        self._loss: StepLoss | None = None
        self._step_times = StepTimes()
        self._has_trained = False
        self.model.install()
        # From here on nothing is refused, so a writer may replace the files of an earlier run.
        if self.config != config or fixed:
            changed = Settings(self.config.model_dump(mode="json"), by_source(fixed))
            self._reporter.write(Event(num_done, changed))
        self._start(state, first)

    @property
    def plan(self) -> PrecisionPlan:
        """The current plan."""
        return self._state.plan

    @property
    def history(self) -> Sequence[tuple[int, str]]:
        """(first iteration under it, digest) of each plan after the run's first one, in order."""
        return self._state.history

    def forward_backward(self, iteration: int, function: ForwardBackward, **kwargs: Any) -> Results:
        """All ranks: run an iteration's forward-backward under the plan; measure it if that is due.

        Megatron's rerun state machine may repeat an iteration whose result it doubts. The state
        before its first attempt comes back, and the last attempt counts.

        Args:
            iteration: Megatron's iteration (1-based).
            function: Megatron's forward-backward function.
            kwargs: keyword arguments of `function`, among them `data_iterator` and `model`; under
                Megatron's `calculate_per_token_loss` also `micro_batch_size`, `num_microbatches`
                and `seq_length`. Without `num_microbatches` the saving that is reported with a
                new plan is that of one microbatch. The caller has zeroed the gradients, as
                Megatron's `train_step` does.

        Returns:
            What `function` returns.
        """
        set_iteration(iteration)
        self.evaluations.begin_iteration(iteration)
        state, is_repeated = self._state_before(iteration)
        state = self._with_due_plan(state, iteration, kwargs.get("num_microbatches", 1))
        self.model.gather_weights(self._optimizer)
        state = self._with_due_refresh(state, iteration)
        measures = state.schedule.refreshed == iteration
        if not measures:
            state = self._with_plan_for_new_target(state, iteration)

        # A step of fused MLPs is measured in an extra run without the fusion.
        is_judged = state.guard is not None and state.guard.is_judging
        has_extra_run = measures and bool(self.model.job.ties)
        step = TrainingStep(function, kwargs, may_repeat=is_judged or has_extra_run)
        run = partial(self._guard.run, iteration, step, state.plan, state.guard)
        if not measures:
            outcome = run()
            state = self._after_step(state, iteration, outcome)
        else:
            outcome, refresh = self._observations.run(iteration, step, run)
            state = self._after_step(state, iteration, outcome)
            state = self._after_refresh(state, iteration, refresh)
        if measures or outcome.was_judged or is_repeated:
            self._step_times.leave_out()
        self._loss = outcome.loss
        self._state = replace(state, iteration=iteration)
        return outcome.results

    def end_iteration(self, iteration: int, metrics: dict[str, Any]) -> None:
        """All ranks, after an iteration and its evaluation: report its metrics.

        Args:
            iteration: Megatron's iteration (1-based).
            metrics: values by name, such as `loss`, `grad_norm` and `lr`. `step_s`, in seconds, is
                not reported if the iteration measured, was judged by the guard, was repeated by
                Megatron, or was the first under its plan or in this process.
        """
        self.evaluations.end_iteration()
        self._has_trained = True
        self._read_loss()
        metrics = self._step_times.end_iteration(metrics)
        share = self._plans.lowest_precision_share(self.plan)
        metrics["lowest_precision_fraction"] = share  # its name in metrics.jsonl
        metrics |= self.evaluations.take_metrics()
        self._reporter.write(Event(iteration, Metrics(metrics)))

    def evaluation(self, name: str = "validation") -> AbstractContextManager[Runner]:
        """All ranks: the context in which an evaluation runs, in the plan's precision or BF16.

        Args:
            name: the evaluation's name in the log and in metrics.

        Yields:
            A function to call in place of Megatron's forward-backward function. Its first argument
            is Megatron's function. With `--snip-eval-precision both` it runs each microbatch twice,
            with `groups` more often.
        """
        self.model.gather_weights(self._optimizer)
        return self.evaluations.running(name, self.plan)

    def end_evaluation(self, metrics: Mapping[str, Any] | None = None) -> None:
        """All ranks, after an evaluation: report it if no iteration will.

        What evaluations after the last iteration find is added to that iteration's metrics. A
        process that has not trained (`--skip-train`) has no such metrics, and only logs.

        Args:
            metrics: values by name, such as the evaluation's loss.
        """
        if self.evaluations.iteration_is_open:
            return
        values = {**(metrics or {}), **self.evaluations.take_metrics()}
        if self._has_trained:
            added = Metrics(values, is_addition=True)
            self._reporter.write(Event(self.evaluations.iteration, added))

    def state(self, iteration: int) -> RunState:
        """Return what a checkpoint after `iteration` keeps; the same on all ranks.

        Megatron's rerun state machine may give up an iteration whose result it doubts, and save a
        checkpoint of the iteration before it. A resumed run then repeats the iteration from there.

        Args:
            iteration: the last iteration done; or i - 1, if Megatron gave up iteration i.
        """
        is_given_up = iteration == self._begun - 1
        state = self._before if is_given_up else self._state
        # A resumed run reads what this run wrote up to here.
        self._reporter.flush()
        return replace(
            state,
            iteration=iteration,
            schedule=self._schedule.checkpointed(state.schedule, state.iteration, iteration),
            settings=self._plans.reported_settings(),
        )

    def close(self) -> None:
        """All ranks: restore Megatron's methods, end the solver's process, close the writers."""
        self.model.uninstall()
        self._solver.close()
        self._reporter.close()

    # ---- the start ------------------------------------------------------------------------------

    def _start(self, stopped: RunState | None, first: FirstPlan) -> None:
        """All ranks: apply and report the first plan; continue with what was being solved.

        Args:
            stopped: the state of the stopped run; None for a new run.
            first: the plan that the run starts with.
        """
        self.model.apply_together(lambda: self.plan)
        for text in self._resolved(self._state.iteration + 1, self.plan).summary():
            self._reporter.log(text)
        change = first_change(self._state, stopped, self._plans)
        if change is not None:
            num_changed, is_resumed = change
            first_iteration = self._state.iteration + 1
            self._report_plan(first_iteration, self.plan, num_changed, is_resumed=is_resumed)
        enough = self._observations.suffice(self._state.observations)
        for text in differences(self._state, stopped, first, self._plans, enough):
            self._reporter.warn(text)
        if stopped is None or not self._schedule.changes_plans:
            return
        done = self._state.iteration
        try:
            if first.is_outdated:
                # Training waits for the plan: it is due before the next iteration.
                mean = self._state.observations
                if mean is not None and self._observations.suffice(mean):
                    target = self._plans.targets_of(self._state).at(done + 1)
                    problem = self._problem(mean, target, "planning for the new settings")
                    self._state = self._begin_solve(self._state, done, problem, apply_at=done + 1)
            elif first.source is PlanSource.CHECKPOINT and stopped.solve is not None:
                # The plan is due when it was, and not later than the lag of this run allows.
                solve = stopped.solve
                apply_at = min(solve.apply_at, solve.iteration + self.config.lag)
                problem = self._plans.fitted_problem(solve.problem)
                pending = PendingProblem(solve.iteration, max(apply_at, done + 1), problem)
                self._state = replace(self._state, solve=pending)
                self._solver.begin(pending, self.plan)
        except SnipError as failure:
            self._keep_plan(self._state, done + 1, failure)

    # ---- an iteration, in order -----------------------------------------------------------------

    def _state_before(self, iteration: int) -> tuple[RunState, bool]:
        """All ranks: return the state before an iteration, and whether Megatron repeats it."""
        if iteration == self._begun:
            self._loss = None  # that of the attempt that is repeated
            self.model.apply(self._before.plan.linears)
            return self._before, True
        self._read_loss()
        self._begun = iteration
        self._before = self._state
        return self._state, False

    def _read_loss(self) -> None:
        """All ranks: add the loss of the last iteration that was not judged to the state."""
        loss = self._loss
        self._loss = None
        guard = self._state.guard
        if loss is not None and guard is not None:
            self._state = replace(self._state, guard=guard.after_loss(loss.read()))

    def _with_due_plan(self, state: RunState, iteration: int, num_microbatches: int) -> RunState:
        """All ranks: if the solver's plan is due, get it from rank 0 and let the linears run it."""
        pending = state.solve
        if pending is None or iteration < pending.apply_at:
            return state
        without = replace(state, solve=None)

        def read() -> PrecisionPlan:
            plan = PrecisionPlan.from_dict(found)
            # Without statistics all quality losses of its problem were 0.
            return without_objective(plan) if self._schedule.plans_without_statistics else plan

        # This is read first, because `_apply` starts the mean of the new plan.
        mean_step_s = self._step_times.mean_s
        try:
            found, waited_s = self._solver.plan_of(pending, state.plan)
            if state.guard is not None and found["digest"] in state.guard.refused:
                # It is not asked for again: the same measurements would give the same plan. The
                # next refresh plans.
                refused = PlanningError(f"the guard reverted {read().label} before")
                self._keep_plan(state, iteration, refused)
                return without
            after, applied = self._apply(without, iteration, read, waited_s, num_microbatches)
        except SnipError as failure:
            self._keep_plan(state, iteration, failure)
            return after_failed_plan(state, iteration, self.config.interval)
        if applied.num_changed and state.guard is not None:
            guard = state.guard.after_plan_change(state.plan, self.config.guard_sigmas)
            after = replace(after, guard=guard)
        text = applied.summary
        if applied.saving_s is not None and mean_step_s is not None:
            text += f", mean step before {1e3 * mean_step_s:.4g} ms"
        self._reporter.log(f"iteration {iteration}: {text}")
        return after

    def _with_due_refresh(self, state: RunState, iteration: int) -> RunState:
        """Begin a refresh that is due."""
        wanted_at = None if state.guard is None else state.guard.refresh_at
        schedule = state.schedule
        since = self._schedule.due_since(schedule, state.iteration, iteration, wanted_at)
        if since is None:
            return state
        if state.solve is not None:
            # The solver still works on a plan: one for a new target, or that of a refresh that the
            # guard asked for out of turn. This refresh is left out.
            return replace(state, schedule=replace(schedule, due_since=None))
        return replace(state, schedule=ScheduleState(refreshed=iteration))

    def _with_plan_for_new_target(self, state: RunState, iteration: int) -> RunState:
        """All ranks: if the target is about to change, plan anew from the measurements so far."""

        def suffices() -> bool:
            return self._observations.suffice(state.observations)

        target = target_to_plan_for(state, iteration, self._plans, suffices)
        if target is None:
            return state
        try:
            problem = self._problem(state.observations, target, "planning anew")
            return self._begin_solve(state, iteration, problem)
        except SnipError as failure:
            self._keep_plan(state, iteration, failure)
            return replace(state, target=target)  # this target is not tried again

    def _after_step(self, state: RunState, iteration: int, outcome: Outcome) -> RunState:
        """All ranks: report a spike; if the guard chose the fallback, make it the current plan."""
        if outcome.message is not None:
            self._reporter.notify(iteration, "guard", outcome.message)
        if outcome.fallback is None or outcome.guard is None:
            return replace(state, guard=outcome.guard)
        # A plan's file is named by the plan's iteration. The copy gets the iteration of the revert,
        # so that it does not overwrite the file that the fallback already has.
        plan = outcome.fallback.model_copy(update={"iteration": iteration})
        num_changed = len(changed_linears(state.plan, plan))
        text = (
            f"reverted {state.plan.label}: {num_changed} of {len(plan.linears)} linears are as in "
            f"{outcome.fallback.label}"
        )
        self._reporter.notify(iteration, "reverted", text)
        sigmas = self.config.guard_sigmas
        guard = outcome.guard.after_revert(state.plan, plan, iteration, sigmas)
        # A problem that is being solved may have been measured under the reverted plan.
        after, _ = self._apply(without_problem(state), iteration, lambda: plan)
        return replace(after, guard=guard)

    def _after_refresh(self, state: RunState, iteration: int, refresh: Refresh) -> RunState:
        """All ranks: add a refresh that was measured on every rank; plan from it."""
        try:
            mean = self._observations.mean_with(state.observations, refresh)
            state = replace(state, observations=mean)
            target = self._plans.targets_of(state).at(iteration + self.config.lag)
            make = partial(self._observations.problem, mean, target)
            divergences, problem = self._control.attempt("making a planning problem", make)
        except SnipError as failure:
            self._keep_plan(state, iteration, failure)
            return state
        health = refresh.health
        noise = health.gradient_noise(state.plan.linears)
        watched = state.watched or divergences.most_fragile(NUM_WATCHED)
        state = replace(state, watched=watched)
        text = f"measured {len(self.model.job.linears)} linears in {refresh.seconds:.2f} s"
        if self.config.heal_below_noise is not None and noise is not None:
            text += f", gradient noise {noise:.3g}"
        self._reporter.log(f"iteration {iteration}: {text}")
        measured = Measurement(divergences, problem, refresh.seconds, health, noise, watched)
        self._reporter.write(Event(iteration, measured))
        alert, alerts = new_alerts(self.config.alerts, health, state.alerts)
        if alert is not None:
            self._reporter.notify(iteration, "health", alert)
        state = replace(state, alerts=alerts)
        if not self._schedule.changes_plans:
            return state
        targets = self._plans.targets_of(state)
        if begins_below_noise(self.config, targets, iteration, noise):
            text = (
                f"gradient noise {noise:.3g} under {state.plan.label} is above "
                f"{self.config.heal_below_noise:g}: healing begins"
            )
            self._reporter.notify(iteration, "health", text)
            state = replace(state, heal_from=iteration)
        return self._begin_solve(state, iteration, problem)

    # ---- the steps of these ---------------------------------------------------------------------

    def _problem(self, mean: StatisticsTable | None, target: float, what: str) -> PlanningProblem:
        """All ranks: return the problem of earlier measurements, or of a policy without any.

        Raises:
            SnipError: on every rank, if one cannot make it.
        """

        def make() -> PlanningProblem:
            if mean is None or self._schedule.plans_without_statistics:
                return self._plans.available.problem_without_measurements(target)
            _, problem = self._observations.problem(mean, target)
            return problem

        return self._plans.fitted_problem(self._control.attempt(what, make))

    def _begin_solve(
        self,
        state: RunState,
        iteration: int,
        problem: PlanningProblem,
        apply_at: int | None = None,
    ) -> RunState:
        """All ranks: give a problem to the solver; return the state in which it is solved."""
        state = with_problem(state, iteration, problem, self._plans, apply_at)
        assert state.solve is not None
        self._solver.begin(state.solve, state.plan)
        return state

    def _apply(
        self,
        state: RunState,
        iteration: int,
        read: Callable[[], PrecisionPlan],
        waited_s: float = 0.0,
        num_microbatches: int | None = None,
    ) -> tuple[RunState, PlanApplied]:
        """All ranks: let the linears run a plan; return the state under it, and what was reported.

        Args:
            state: the state under the plan before.
            iteration: the first iteration under the plan.
            read: returns the plan, the same on all ranks.
            waited_s: seconds that training waited for it.
            num_microbatches: of an iteration, for the saving that is reported; None reports none.

        Raises:
            RemoteFailure: on every rank, if one cannot read the plan, or a linear of it refuses.
                Then all linears run as before.
        """
        try:
            plan = self.model.apply_together(read)
        except RemoteFailure:
            self.model.apply(state.plan.linears)
            raise
        saving_s = None
        if num_microbatches is not None:
            saving_s = self._plans.saving_s(plan, num_microbatches)
        num_changed = len(changed_linears(state.plan, plan))
        applied = self._report_plan(
            iteration, plan, num_changed, waited_s=waited_s, saving_s=saving_s
        )
        history = (*state.history, (iteration, plan.digest))
        return replace(state, plan=plan, history=history), applied

    def _report_plan(
        self,
        iteration: int,
        plan: PrecisionPlan,
        num_changed: int,
        *,
        is_resumed: bool = False,
        waited_s: float = 0.0,
        saving_s: float | None = None,
    ) -> PlanApplied:
        """All ranks: report a plan, and what every linear runs under it.

        Args:
            iteration: the first iteration under the plan.
            plan: the plan, which the linears run.
            num_changed: how many linears run another option than before.
            is_resumed: whether a stopped run had the same plan.
            waited_s: as in `_apply`.
            saving_s: as in `_apply`.
        """
        applied = PlanApplied(
            plan,
            format_shares(plan.linears, self.model.job.stage_and_flops),
            num_changed,
            waited_s=waited_s,
            resumed=is_resumed,
            resolved=self._resolved(iteration, plan),
            saving_s=saving_s,
        )
        self._reporter.write(Event(iteration, applied))
        self._step_times.start_plan()
        return applied

    def _resolved(self, iteration: int, plan: PrecisionPlan) -> PrecisionRecord:
        """All ranks: return what every linear runs under a plan, from an iteration on."""
        available = self._plans.available
        return self.model.resolved(plan, iteration, available.fixed, available.unused_rules)

    def _keep_plan(self, state: RunState, iteration: int, failure: SnipError) -> None:
        """Report a failure, which all ranks have, after which the plan stays."""
        text = f"keeping {state.plan.label}: {failure}"
        self._reporter.notify(iteration, "refresh_failed", text)
