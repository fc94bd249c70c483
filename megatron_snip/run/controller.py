"""The controller: the order of what happens in an iteration; all ranks make the same calls.

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

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_snip.collectives import RemoteFailure
from megatron_snip.config import SnipConfig
from megatron_snip.errors import PlanningError
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.log import set_iteration
from megatron_snip.planning.fixed import by_source, summary
from megatron_snip.planning.plan import (
    PrecisionPlan,
    changed_linears,
    without_objective,
)
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting.events import (
    Event,
    Metrics,
    Reporter,
    Settings,
    Writer,
)
from megatron_snip.run.alerts import Alerts
from megatron_snip.run.current_plan import CurrentPlan
from megatron_snip.run.evaluation import Evaluations
from megatron_snip.run.guard import Guard, Outcome
from megatron_snip.run.metrics import StepMetrics
from megatron_snip.run.observation import MIN_OPTIMIZER_STEPS, Observations
from megatron_snip.run.plans import FirstPlan, PlanSource, RunPlans
from megatron_snip.run.replanner import Replanner
from megatron_snip.run.schedule import RefreshSchedule
from megatron_snip.run.solve import Solve
from megatron_snip.run.state import ControllerState, state_of_model
from megatron_snip.run.step import ForwardBackward, Results, Runner, TrainingStep
from megatron_snip.topology import Topology


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
        metrics: collects an iteration's metrics; for training loops that do not collect their own.
        evaluations: names the evaluations, and decides in which precision they run. With
            `--snip-eval-precision both` it keeps the loss increase of each evaluation until an
            iteration's metrics are reported.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        *,
        seed: int = 0,
        writers: Sequence[Writer] = (),
        state: ControllerState | None = None,
        topology: Topology | None = None,
        solver: SolverProcess | None = None,
        microbatch_tokens: int | None = None,
        encoder_tokens: int | None = None,
        evaluation_tokens: tuple[int | None, int | None] | None = None,
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
            microbatch_tokens: samples of a microbatch times their length; None if they vary.
            encoder_tokens: the same for the encoder, where it reads another number (a T5).
            evaluation_tokens: the same two of an evaluation's microbatch; by default the same.
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
        self.model = PlannedModel(
            model, topology, seed, config.backend, microbatch_tokens, encoder_tokens
        )
        if evaluation_tokens != (microbatch_tokens, encoder_tokens):
            self.model.runtime.evaluation_tokens = evaluation_tokens
        self._plans = RunPlans(config, self.model, train_iters, calibration_cache)
        self.config = self._plans.config
        self._run_id = run_id

        # What follows may warn through the reporter. What was found above is reported here.
        self.metrics = StepMetrics(topology)
        self._control = topology.control
        self._reporter = Reporter(writers, logs=topology.rank == 0)
        for text in self._plans.available.warnings:
            self._reporter.warn(text)
        fixed = self._plans.available.fixed
        if fixed:
            self._reporter.log(summary(fixed, len(self.model.all_linears)))
        if state is not None:
            state, warning = state_of_model(state, (each.name for each in self.model.all_linears))
            if warning is not None:
                self._reporter.warn(warning)

        # What the controller drives: schedule, observations, guard, alerts, solver, evaluations.
        self._optimizer = optimizer
        self._make_owners(seed, solver, num_done)
        self._warn_if_nothing_is_measured(train_iters)
        self.evaluations.warn_if_a_plan_cannot_run(self._plans.available.options)

        self._has_trained = False

        # The plan that the run starts with, and the rest of a stopped run's state.
        first = self._plans.first_plan(state, seed, num_done)
        self._current = CurrentPlan(first.plan, self.model, self._plans, self._reporter)
        if state is not None:
            self._load(state)
        self._replanner = Replanner(
            self._plans,
            self._schedule,
            self._observations,
            self._solve,
            self._current,
            topology,
        )
        # The state before the iteration that began last; None before the first one.
        self._before: ControllerState | None = None
        self.model.install()
        # From here on nothing is refused, so a writer may replace the files of an earlier run.
        if self.config != config or fixed:
            settings = Settings(self.config.model_dump(mode="json"), by_source(fixed))
            self._reporter.write(Event(num_done, settings))
        self._start(state, first, num_done)

    def _make_owners(self, seed: int, solver: SolverProcess | None, num_done: int) -> None:
        """All ranks: make what the controller drives.

        All but `evaluations` own an entry of SNIP's state in a checkpoint (`state_dict`,
        `load_state_dict`).
        """
        config = self.config
        runtime = self.model.runtime
        self._schedule = RefreshSchedule(config, num_done)
        self._observations = Observations(
            config, self.model, self._plans.available, self._optimizer
        )
        # A plan that never changes is not judged.
        is_guarded = config.guard and self._schedule.changes_plans
        sigmas = config.guard_sigmas if is_guarded else None
        self._guard = Guard(sigmas, self.model, self._optimizer, self._plans.job_fallback)
        self._alerts = Alerts(config.alerts)
        if runtime.topology.rank != 0 or not self._schedule.changes_plans:
            solver = None
        elif solver is None:
            solver = SolverProcess()
        self._solve = Solve(self._plans.plan_settings(seed), self._control, solver)
        self.evaluations = Evaluations(
            config.eval_precision, self.model, self._reporter, self._observations, num_done
        )

    @property
    def plan(self) -> PrecisionPlan:
        """The current plan."""
        return self._current.plan

    @property
    def history(self) -> Sequence[tuple[int, str]]:
        """(first iteration under it, digest) of each plan after the run's first one, in order."""
        return self._current.history

    @property
    def format_shares(self) -> dict[str, float]:
        """Share of the linears' FLOPs in each format under the current plan."""
        return self._current.format_shares

    def forward_backward(self, iteration: int, function: ForwardBackward, **kwargs: Any) -> Results:
        """All ranks: run an iteration's forward-backward under the plan; measure it if that is due.

        Megatron's rerun state machine may repeat an iteration whose result it doubts. Training goes
        on with the gradients of the last attempt, so what that one measured counts.

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
        self._guard.begin(iteration)
        is_repeated = self._note_state_before(iteration)
        self._apply_due_plan(iteration, kwargs.get("num_microbatches", 1))
        self.model.gather_weights(self._optimizer)
        self._begin_due_refresh(iteration)
        measures = self._schedule.measures(iteration)
        observation = None
        # A step of fused MLPs is measured in an extra run without the fusion.
        has_extra_run = measures and self.model.has_fused_mlps
        may_repeat = self._guard.is_judging or has_extra_run
        step = TrainingStep(function, kwargs, may_repeat)
        if measures:
            observation = self._observations.begin(iteration)
            self._observations.observe_unfused(observation, iteration, step)
        else:
            self._replanner.plan_for_new_target(iteration)
        with self._observations.observing_step(observation):
            outcome = self._guard.run(iteration, step, self.plan)
        self._take_guards_decision(iteration, outcome)
        self._observations.end(observation, step, outcome)
        if measures or outcome.was_judged or is_repeated:
            self._current.step_times.leave_out()
        if measures:
            self._finish_refresh(iteration)
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
        self._guard.read_loss()
        metrics = self._current.step_times.end_iteration(metrics)
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
            is Megatron's function. With `--snip-eval-precision both` it runs each microbatch twice.
        """
        self.model.gather_weights(self._optimizer)
        return self.evaluations.running(name, self.plan)

    def end_evaluation(self) -> None:
        """All ranks, after an evaluation in Megatron's loop: report it if no iteration will.

        What evaluations after the last iteration find is added to that iteration's metrics. A
        process that has not trained (`--skip-train`) has no such metrics, and only logs.
        """
        if self.evaluations.iteration_is_open:
            return
        metrics = self.metrics.finish(lr=None, tokens=0, log_losses=False)
        metrics |= self.evaluations.take_metrics()
        if self._has_trained:
            added = Metrics(metrics, is_addition=True)
            self._reporter.write(Event(self.evaluations.iteration, added))

    def state(self, iteration: int) -> ControllerState:
        """Return what a checkpoint after `iteration` keeps; the same on all ranks.

        Megatron's rerun state machine may give up an iteration whose result it doubts, and save a
        checkpoint of the iteration before it. A resumed run then repeats the iteration from there.

        Args:
            iteration: the last iteration done; or i - 1, if Megatron gave up iteration i.
        """
        before = self._before
        is_given_up = before is not None and before.iteration == iteration
        state = before if before is not None and is_given_up else self._state_now(iteration)
        # A resumed run reads what this run wrote up to here.
        self._reporter.flush()
        return replace(state, settings=self._plans.reported_settings())

    def _state_now(self, iteration: int) -> ControllerState:
        """Return the state after `iteration`, without what takes time to collect.

        Everything in it is immutable, so it costs an iteration microseconds.
        """
        return ControllerState(
            iteration=iteration,
            plan=self.plan,
            run_id=self._run_id,
            history=tuple(self.history),
            target=self._replanner.target,
            schedule=self._schedule.state_dict(iteration),
            solve=self._solve.state_dict(),
            guard=self._guard.state_dict(),
            observations=self._observations.state_dict(),
            alerts=self._alerts.state_dict(),
        )

    def close(self) -> None:
        """All ranks: restore Megatron's methods, end the solver's process, close the writers."""
        self.model.uninstall()
        self._solve.close()
        self._reporter.close()

    # ---- the start ------------------------------------------------------------------------------

    def _warn_if_nothing_is_measured(self, train_iters: int | None) -> None:
        config = self.config
        # With a plan file there is a plan to run, so a run without a measurement makes sense.
        should_measure = config.plan_file is None and (
            config.collect_only or not self._schedule.plans_without_statistics
        )
        if should_measure and train_iters is not None and train_iters < config.start_step:
            self._reporter.warn(
                f"nothing will be measured: --snip-start-step is {config.start_step}, and the run "
                f"has {train_iters} iterations"
            )

    def _load(self, state: ControllerState) -> None:
        """All ranks: give every owner its part of a stopped run's state.

        The pending problem is not loaded here: `Replanner.resume` decides whether it is solved.
        """
        self._current.history = list(state.history)
        self._schedule.load_state_dict(state.schedule)
        self._observations.load_state_dict(state.observations)
        self._alerts.load_state_dict(state.alerts)
        guard = state.guard
        if guard is not None and guard.first_fallback is not None:
            fitted, _ = self._plans.fitting.plan(guard.first_fallback)
            guard = guard.model_copy(update={"first_fallback": fitted})
        self._guard.load_state_dict(guard)

    def _start(self, state: ControllerState | None, first: FirstPlan, num_done: int) -> None:
        """All ranks: apply and report the first plan; continue with what was being solved.

        Args:
            state: the state of the stopped run; None for a new run.
            first: the plan that the run starts with.
            num_done: iterations that the weights were trained for.
        """
        former_plan = None if state is None else state.plan
        self._current.start(former_plan, num_done, may_change=self._schedule.changes_plans)
        if state is not None and state.plan.digest != self.plan.digest:
            # The guard judges the new plan. Its fallback is the stopped run's plan, made to fit
            # this run. With new pins or formats this fitted plan can equal the new plan. Then the
            # fallback of the stopped run stays.
            fitted, _ = self._plans.fitting.plan(state.plan)
            equals_new_plan = fitted.digest == self.plan.digest
            fallback = self._guard.state.first_fallback if equals_new_plan else fitted
            self._guard.plan_changed(fallback=fallback)
        for text in self._differences(state, first):
            self._reporter.warn(text)
        if state is not None and self._schedule.changes_plans:
            with self._current.kept_on_error(num_done + 1):
                self._replanner.resume(state, first)

    def _differences(self, state: ControllerState | None, first: FirstPlan) -> list[str]:
        """Return lines about what differs from the stopped run, or from the plan file."""
        settings = [] if state is None else state.changes(self._plans.reported_settings())
        if settings:
            texts = [*settings, *first.changes]
            left = () if state is None else changed_linears(state.plan, self.plan)
            if left and first.source is not PlanSource.CHECKPOINT:
                options = dict.fromkeys(str(self.plan.linears[name]) for name in left)
                texts.append(
                    f"{len(left)} of {len(self.plan.linears)} linears leave the checkpoint's plan "
                    f"and run {', '.join(options)}"
                )
            if first.is_outdated and not self._observations.suffice():
                texts.append("the next refresh plans with them")
            return [f"this run resumes with other settings: {'; '.join(texts)}"]
        changes = (*first.changes, *self._plans.recipe_changes())
        return [f"{self.plan.label}: {text}" for text in changes]

    # ---- an iteration, in order -----------------------------------------------------------------

    def _note_state_before(self, iteration: int) -> bool:
        """Keep the state before an iteration; return whether Megatron repeats the iteration.

        If it is repeated, the state noted before its first run stays.
        """
        if self._before is not None and self._before.iteration == iteration - 1:
            return True
        self._before = self._state_now(iteration - 1)
        return False

    def _apply_due_plan(self, iteration: int, num_microbatches: int) -> None:
        """All ranks: if the solver's plan is due, get it from rank 0 and apply it."""
        if not self._solve.is_due(iteration):
            return
        with self._current.kept_on_error(iteration):
            plan, waited_s = self._replanner.take_plan(iteration)
            if self._schedule.plans_without_statistics:
                plan = without_objective(plan)  # all quality losses of its problem were 0
            if self._guard.refuses(plan):
                raise PlanningError(f"the guard reverted {plan.label} before")
            former = self.plan
            # This is read first, because `change` starts the mean of the new plan.
            mean_step_s = self._current.step_times.mean_s
            saving_s = self._plans.saving_s(plan, num_microbatches)
            try:
                applied = self._current.change(iteration, plan, waited_s, saving_s)
            except RemoteFailure:
                self._replanner.plan_later(iteration)
                raise
            if applied.num_changed:
                self._guard.plan_changed(fallback=former)
            text = applied.summary
            if saving_s is not None and mean_step_s is not None:
                text += f", mean step before {1e3 * mean_step_s:.4g} ms"
            self._reporter.log(f"iteration {iteration}: {text}")

    def _begin_due_refresh(self, iteration: int) -> None:
        """All ranks: begin a refresh that is due, or wait for the optimizer's moments."""
        if not self._schedule.is_due(iteration, self._guard.state.refresh_at):
            return
        # The solver may still work on a plan: one for a new target, or that of a refresh that the
        # guard asked for out of turn.
        if self._solve.is_under_way:
            self._schedule.leave_out(iteration)
            return
        if self._observations.may_begin():
            self._schedule.begin(iteration)
            return
        if not self._schedule.is_waiting:
            self._reporter.log(
                f"iteration {iteration}: measuring waits until the optimizer has made "
                f"{MIN_OPTIMIZER_STEPS} steps"
            )
        self._schedule.wait(iteration)

    def _take_guards_decision(self, iteration: int, outcome: Outcome) -> None:
        """All ranks: report a spike; if the guard chose the fallback, make it the current plan."""
        if outcome.message is not None:
            self._reporter.notify(iteration, "guard", outcome.message)
        if outcome.fallback is None:
            return
        self._replanner.drop()  # a problem that may have been measured under the reverted plan
        # A plan's file is named by the plan's iteration. The copy gets the iteration of the revert,
        # so that it does not overwrite the file that the fallback already has.
        plan = outcome.fallback.model_copy(update={"iteration": iteration})
        self._guard.reverted(self.plan, plan, iteration)
        num_changed = len(changed_linears(self.plan, plan))
        text = (
            f"reverted {self.plan.label}: {num_changed} of {len(plan.linears)} linears are as in "
            f"{outcome.fallback.label}"
        )
        self._reporter.notify(iteration, "reverted", text)
        self._current.change(iteration, plan)

    def _finish_refresh(self, iteration: int) -> None:
        """All ranks: end a refresh if it was measured on every rank; submit its problem."""
        with self._current.kept_on_error(iteration):
            self._observations.complete()
            target = self._plans.targets.at(iteration + self.config.lag)
            make = partial(self._observations.measurement, target)
            measured = self._control.attempt("making a planning problem", make)
            self._reporter.log(
                f"iteration {iteration}: measured {len(self.model.all_linears)} linears in "
                f"{measured.seconds:.2f} s"
            )
            self._reporter.write(Event(iteration, measured))
            alert = self._alerts.report(measured.health)
            if alert is not None:
                self._reporter.notify(iteration, "health", alert)
            if self._schedule.changes_plans:
                self._replanner.submit(iteration, measured.problem)
