"""The controller: the order of what happens in an iteration; all ranks make the same calls.

    apply      a plan that is due: rank 0 broadcasts it (or why there is none), every rank applies
               it and checks its digest
    observe    if a refresh is due, the iteration is measured while it runs
    run        the forward-backward, again under another plan if the guard demands it
    plan       after the last measurement of a refresh all ranks sum the statistics, and rank 0
               gives the problem to the solver's process; its plan is due `lag` iterations later

If measuring, planning or applying fails on one rank, all ranks keep the current plan, warn once and
continue. A plan that breaks the loss is reverted (guard.py).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from megatron_snip.collectives import RemoteFailure, attempt
from megatron_snip.config import SnipConfig
from megatron_snip.errors import PlanningError, SnipError
from megatron_snip.linears.availability import resolve_formats
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.log import set_iteration
from megatron_snip.options import BF16
from megatron_snip.planning.plan import (
    PrecisionPlan,
    changed_linears,
    format_shares,
    without_objective,
)
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting.events import Event, Metrics, PlanApplied, Reporter, Writer
from megatron_snip.run.alerts import Alerts
from megatron_snip.run.evaluation import PairedEvaluation
from megatron_snip.run.guard import Guard, Outcome
from megatron_snip.run.healing import healing_problem, heals_in_order
from megatron_snip.run.metrics import StepMetrics
from megatron_snip.run.observation import MIN_OPTIMIZER_STEPS, Observations, observing
from megatron_snip.run.plan_file import recipe_changes
from megatron_snip.run.plans import FirstPlan, PlanSource, RunPlans
from megatron_snip.run.schedule import Schedule
from megatron_snip.run.solve import PendingProblem, Solve
from megatron_snip.run.state import ControllerState, reported_settings
from megatron_snip.run.step import (
    ForwardBackward,
    Results,
    TrainingStep,
    run_once,
)
from megatron_snip.topology import Topology


class SnipController:
    """Drives SNIP in one training process; construct it on all ranks together.

    A training loop calls on every rank, for each iteration (1-based, as Megatron counts):
    `forward_backward` in place of its forward-backward function, and `end_iteration`; around
    evaluations `evaluation`; `state` where it saves; and `close` at the end.

    Attributes:
        config: the settings, with the formats that `auto` means here.
        model: the planned linears.
        plan: the current plan.
        history: (iteration, digest) of every plan applied, in order.
        metrics: collects an iteration's metrics for loops that have no place for them.
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
        calibration_cache: Path | None = None,
        train_iters: int | None = None,
        num_done: int = 0,
    ) -> None:
        """All ranks: attach to a built model.

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
            calibration_cache: a file of rank 0 that stores measured seconds for a resumed run.
            train_iters: the last iteration of the run; healing needs it.
            num_done: iterations that the weights have done; with a state that is the state's.

        Raises:
            UsageError: on every rank, if the policy is unknown, a pin or the plan file does not
                fit the model or each other, healing does not fit the run, or no plan reaches the
                target.
            UnsupportedError: on every rank, if the backend cannot run the model's linears or the
                lowest precision among the formats, or the target cannot count seconds.
        """
        # What the model is, what it can run, and under which settings.
        topology = current_topology() if topology is None else topology
        config = resolve_formats(config, model, topology.control)
        self.model = PlannedModel(model, topology, seed, config.backend, microbatch_tokens)
        self._plans = RunPlans(config, self.model, train_iters, calibration_cache)
        self.config = self._plans.config

        # Who reports, and who does what.
        self.metrics = StepMetrics(topology)
        self._control = topology.control
        self._reporter = Reporter(writers, logs=topology.rank == 0)
        for text in self._plans.available.warnings:
            self._reporter.warn(text)
        self._make_owners(optimizer, seed, solver)
        self._warn_if_nothing_is_measured(train_iters)

        # Where training is.
        self._iteration = num_done if state is None else state.iteration  # that began last
        self._is_in_iteration = False
        self._has_trained = False
        # What the next report says beside an iteration's metrics.
        self._evaluated: dict[str, Any] = {}
        self._evaluations: Counter[str] = Counter()  # since the last iteration began
        self._step_s: list[float] = []  # of ordinary iterations under the current plan
        self._is_ordinary = False  # whether the current iteration's seconds are those of the plan

        # The plan that the run starts with, and the rest of a stopped run's state.
        first = self._plans.first_plan(state, seed)
        self.plan = first.plan
        self.history: list[tuple[int, str]] = []
        if state is not None:
            self._load(state)
        self._planned_target = self._first_planned_target(state)
        self.model.install()
        self._start(state, first)

    def _make_owners(self, optimizer: Any, seed: int, solver: SolverProcess | None) -> None:
        """All ranks: make the parts of the controller that keep a state of their own."""
        config = self.config
        self._schedule = Schedule(config)
        self._observations = Observations(config, self.model, self._plans.available, optimizer)
        is_guarded = config.guard and self._schedule.makes_plans
        sigmas = config.guard_sigmas if is_guarded else None
        self._guard = Guard(sigmas, self.model, optimizer, self._plans.fallback)
        self._alerts = Alerts(config.alerts)
        has_solver = self.model.runtime.topology.rank == 0 and self._schedule.makes_plans
        settings = PlanSettings(**config.planning_values(), seed=seed)
        solver = (solver or SolverProcess()) if has_solver else None
        self._solve = Solve(settings, self._control, solver)

    @property
    def format_shares(self) -> dict[str, float]:
        """Share of the linears' FLOPs in each format under the current plan."""
        return format_shares(self.plan.linears, self._plans.work)

    @property
    def evaluates_twice(self) -> bool:
        """Whether an evaluation runs each microbatch under the plan and again in BF16."""
        return self.config.eval_precision == "both"

    def forward_backward(self, iteration: int, function: ForwardBackward, **kwargs: Any) -> Results:
        """All ranks: run an iteration's forward-backward under the plan, observed if it is due.

        Megatron's rerun state machine may repeat an iteration whose result it doubts. Training goes
        on with the last run's gradients, so what the last run measured counts.

        Args:
            iteration: Megatron's iteration (1-based).
            function: Megatron's forward-backward function.
            kwargs: its keyword arguments.

        Returns:
            What `function` returns.
        """
        set_iteration(iteration)
        self._iteration = iteration
        self._is_in_iteration = True
        self._evaluations.clear()
        step = TrainingStep(function, kwargs)
        self._guard.read_loss()
        self._apply_due_plan(iteration, kwargs.get("num_microbatches", 1))
        part = self._begin_part(iteration)
        observation = None
        if part is None:
            self._plan_for_new_target(iteration)
        else:
            observation = self._observations.begin(iteration, part, self._schedule.num_parts)
        with observing(observation):
            outcome = self._guard.run(iteration, step, self.plan)
        self._take_guards_decision(iteration, outcome)
        self._observations.end(observation, step, outcome)
        if part is not None or outcome.was_watched:
            self._is_ordinary = False
        if self._schedule.is_last(part):
            self._finish_refresh(iteration)
        return outcome.results

    def end_iteration(self, iteration: int, metrics: dict[str, Any]) -> None:
        """All ranks, after an iteration and its evaluation: report its metrics.

        Args:
            iteration: Megatron's iteration (1-based).
            metrics: by name, such as `loss`, `grad_norm` and `lr`; `step_s` is in seconds. It is
                dropped if the iteration measured, was watched by the guard, or was the first under
                its plan or in this process.
        """
        self._is_in_iteration = False
        self._has_trained = True
        self._guard.read_loss()
        if not self._is_ordinary:
            metrics = {name: value for name, value in metrics.items() if name != "step_s"}
        elif "step_s" in metrics:
            self._step_s.append(metrics["step_s"])
        self._is_ordinary = True
        fraction = {"lowest_precision_fraction": self._plans.lowest_precision_share(self.plan)}
        self._reporter.write(Event(iteration, Metrics(metrics | fraction | self._evaluated)))
        self._evaluated = {}

    def name_evaluation(self, of_test_set: bool = False) -> str:
        """All ranks: return the name of the evaluation that comes next.

        `validation` within an iteration, `final_validation` after the last one, `test`; with a
        number from the second of several sets on.
        """
        name = "validation" if self._is_in_iteration else "final_validation"
        name = "test" if of_test_set else name
        self._evaluations[name] += 1
        number = self._evaluations[name]
        return name if number == 1 else f"{name}_{number}"

    @contextmanager
    def evaluation(self, name: str = "validation") -> Iterator[ForwardBackward]:
        """All ranks: the context in which an evaluation runs, in the plan's precision or BF16.

        Args:
            name: of the evaluation, in the log and in metrics.

        Yields:
            What to call in place of Megatron's forward-backward function, which is its first
            argument. With `--snip-eval-precision both` it runs each microbatch twice.
        """
        runtime = self.model.runtime
        if self.evaluates_twice:
            paired = PairedEvaluation(runtime)
            yield paired.run
            found = paired.increase()
            if found is not None:
                self._report_increase(name, *found)
        else:
            is_bf16 = self.config.eval_precision == "bf16"
            with runtime.running_in_bf16() if is_bf16 else nullcontext():
                yield run_once

    def end_evaluation(self) -> None:
        """All ranks, after an evaluation in Megatron's loop: report it if no iteration will.

        Those after the last iteration complete its metrics. A process that has not trained
        (`--skip-train`) has no such metrics, and only logs.
        """
        if self._is_in_iteration:
            return
        metrics = self.metrics.finish(lr=None, tokens=0, log_losses=False) | self._evaluated
        self._evaluated = {}
        if self._has_trained:
            self._reporter.write(Event(self._iteration, Metrics(metrics, is_addition=True)))

    def state(self, iteration: int) -> ControllerState:
        """Return what a checkpoint after `iteration` keeps; the same on all ranks."""
        return ControllerState(
            iteration=iteration,
            plan=self.plan,
            history=tuple(self.history),
            target=self._planned_target,
            schedule=self._schedule.state_dict(),
            solve=self._solve.state_dict(),
            guard=self._guard.state_dict(),
            observations=self._observations.state_dict(),
            alerts=self._alerts.state_dict(),
            settings=self._reported_settings(),
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
            config.collect_only or not self._schedule.is_static
        )
        if should_measure and train_iters is not None and train_iters < config.start_step:
            self._reporter.warn(
                f"nothing will be measured: --snip-start-step is {config.start_step}, and the run "
                f"has {train_iters} iterations"
            )

    def _load(self, state: ControllerState) -> None:
        """All ranks: give every owner its part of a stopped run's state, but for the solve."""
        self.history = list(state.history)
        self._schedule.load_state_dict(state.schedule)
        self._observations.load_state_dict(state.observations)
        self._alerts.load_state_dict(state.alerts)
        guard = state.guard
        if guard is not None and guard.good is not None:
            good, _ = self._plans.fitting.plan(guard.good)
            guard = guard.model_copy(update={"good": good})
        self._guard.load_state_dict(guard)

    def _first_planned_target(self, state: ControllerState | None) -> float | None:
        """Return the target for which the first plan counts; another one is planned for anew.

        None where there are no measurements to plan from.
        """
        if not self._schedule.is_static and self._observations.mean is None:
            return None
        if state is None or state.target is None:
            return self.plan.target
        return state.target

    def _start(self, state: ControllerState | None, first: FirstPlan) -> None:
        """All ranks: apply and report the first plan; continue with what was being solved."""
        self.model.apply(self.plan.linears)
        before = {} if state is None else state.plan.linears
        num_changed = sum(o != before.get(name, BF16) for name, o in self.plan.linears.items())
        is_resumed = state is not None and state.plan.digest == self.plan.digest
        num_done = self._iteration
        if state is not None and not is_resumed:
            self.history.append((num_done + 1, self.plan.digest))
            # What the guard may fall back to.
            former, _ = self._plans.fitting.plan(state.plan)
            self._guard.plan_changed(former)
        # A first plan of BF16 that the first refresh replaces is not worth a line.
        if num_changed or self.history or not self._schedule.makes_plans:
            self._report_plan(num_done + 1, num_changed, resumed=is_resumed)
        for text in self._differences(state, first):
            self._reporter.warn(text)
        if state is not None and self._schedule.makes_plans:
            with self._keeping_plan(num_done):
                self._continue_planning(state, first)

    def _differences(self, state: ControllerState | None, first: FirstPlan) -> list[str]:
        """Return lines that say what is not as in the stopped run or in the plan file."""
        settings = [] if state is None else state.changes(self._reported_settings())
        if settings:
            texts = [*settings, *first.changes]
            if first.is_outdated and not self._observations.is_measured:
                texts.append("the next refresh plans with them")
            return [f"this run resumes with other settings: {'; '.join(texts)}"]
        return [f"{self.plan.label}: {text}" for text in (*first.changes, *self._recipe_changes())]

    def _reported_settings(self) -> dict[str, str]:
        recipes = self.model.recipes(self.config.named_formats)
        return reported_settings(self.config, str(self.model.backend), recipes)

    def _recipe_changes(self) -> list[str]:
        """Return a line for each option that the run of the plan file ran by another recipe."""
        if self.config.plan_file is None or self.model.runtime.topology.rank != 0:
            return []
        return recipe_changes(self.config.plan_file, self.model)

    def _continue_planning(self, state: ControllerState, first: FirstPlan) -> None:
        """All ranks: plan for new settings, or solve the stopped run's problem again."""
        if first.is_outdated:
            if self._observations.is_measured:
                self._plan_at_once(state.iteration)
        elif first.source is PlanSource.CHECKPOINT and state.solve is not None:
            pending = self._plans.fitting.pending(state.solve, state.iteration)
            self._solve.load_state_dict(pending, self.plan)

    def _plan_at_once(self, num_done: int) -> None:
        """All ranks: plan from the checkpoint's measurements, before the first iteration."""
        target = self._plans.targets.at(num_done + 1)
        make = partial(self._observations.measurement, target)
        problem = attempt("planning for the new settings", make, self._control).problem
        problem = self._plans.fitting.problem(problem)
        self._submit(num_done, problem, apply_at=num_done + 1)

    # ---- an iteration, in order -----------------------------------------------------------------

    def _apply_due_plan(self, iteration: int, num_microbatches: int) -> None:
        """All ranks: if the solver's plan is due, get it from rank 0 and apply it."""
        if not self._solve.is_due(iteration):
            return
        with self._keeping_plan(iteration):
            plan, waited_s = self._solve.result()
            if self._schedule.is_static:
                plan = without_objective(plan)
            self._check(plan)
            self._apply(plan)
            if changed_linears(self.plan, plan):
                self._guard.plan_changed(self.plan)
            saving_s = self._plans.saving_s(plan, num_microbatches)
            before = ""
            if saving_s is not None and self._step_s:
                before = f", mean step before {1e3 * fmean(self._step_s):.4g} ms"
            applied = self._set_plan(iteration, plan, waited_s=waited_s, saving_s=saving_s)
            self._reporter.log(f"iteration {iteration}: {applied.summary}{before}")

    def _check(self, plan: PrecisionPlan) -> None:
        """Refuse a plan of another model, and one that was reverted before."""
        plan.check_against(self._plans.work)
        if self._guard.refuses(plan):
            raise PlanningError(f"the guard reverted {plan.label} before")

    def _apply(self, plan: PrecisionPlan) -> None:
        """All ranks: set the linears' options; if that fails on a rank, all stay as they were."""
        try:
            attempt("applying the plan", lambda: self.model.apply(plan.linears), self._control)
        except RemoteFailure:
            self.model.apply(self.plan.linears)
            raise

    def _begin_part(self, iteration: int) -> int | None:
        """All ranks: begin a refresh that is due; return the part that the iteration measures."""
        is_due = self._schedule.is_due(iteration, self._guard.state.refresh_at)
        # A plan that is being solved (the guard's refresh, a new target) is applied first.
        if is_due and not self._solve.is_under_way:
            if self._observations.may_begin():
                self._schedule.begin(iteration)
            else:
                if not self._schedule.is_waiting:
                    self._reporter.log(
                        f"iteration {iteration}: measuring waits until the optimizer has made "
                        f"{MIN_OPTIMIZER_STEPS} steps"
                    )
                self._schedule.wait()
        return self._schedule.part(iteration)

    def _plan_for_new_target(self, iteration: int) -> None:
        """All ranks: if the target is about to change, plan anew from the last measurement."""
        target = self._plans.targets.at(iteration + self.config.lag)
        is_new = self._planned_target is not None and self._planned_target != target
        if not is_new or self._solve.is_under_way:
            return
        if not self._schedule.may_plan_for_new_target(iteration):
            return
        self._planned_target = target

        def make() -> PlanningProblem:
            if self._schedule.is_static:
                return self._plans.unmeasured(target)
            return self._observations.measurement(target).problem

        with self._keeping_plan(iteration):
            problem = attempt("planning anew", make, self._control)
            self._submit(iteration, self._plans.fitting.problem(problem))

    def _take_guards_decision(self, iteration: int, outcome: Outcome) -> None:
        """All ranks: report a spike; if the iteration ran under a fallback, that is the plan."""
        if outcome.message is not None:
            self._reporter.notify(iteration, "guard", outcome.message)
        if outcome.fallback is None:
            return
        self._solve.drop()  # its problem was measured under the reverted plan
        # A new iteration gives it a file of its own beside the fallback's.
        plan = outcome.fallback.model_copy(update={"iteration": iteration})
        self._guard.reverted(self.plan, plan, iteration)
        num_changed = len(changed_linears(self.plan, plan))
        text = (
            f"reverted {self.plan.label}: {num_changed} of {len(plan.linears)} linears are as in "
            f"{outcome.fallback.label}"
        )
        self._reporter.notify(iteration, "reverted", text)
        self._set_plan(iteration, plan)

    def _finish_refresh(self, iteration: int) -> None:
        """All ranks: every linear was measured; report it, and give the problem to the solver."""
        with self._keeping_plan(iteration):
            target = self._plans.targets.at(iteration + self.config.lag)
            make = partial(self._observations.measurement, target)
            self._observations.check_complete()
            measured = attempt("making a planning problem", make, self._control)
            self._reporter.log(
                f"iteration {iteration}: measured {len(self.model.all_linears)} linears in "
                f"{measured.seconds:.2f} s"
            )
            self._reporter.write(Event(iteration, measured))
            alert = self._alerts.report(measured.health)
            if alert is not None:
                self._reporter.notify(iteration, "health", alert)
            if self._schedule.makes_plans:
                self._submit(iteration, measured.problem)

    # ---- what several of them use ---------------------------------------------------------------

    def _submit(
        self, iteration: int, problem: PlanningProblem, apply_at: int | None = None
    ) -> None:
        """All ranks: give a problem to the solver; its plan is due `lag` iterations later."""
        if apply_at is None:
            apply_at = iteration + self.config.lag
        self._planned_target = problem.target
        if heals_in_order(self.config, self._plans.targets, apply_at):
            problem = healing_problem(problem, self.plan, self.config)
        self._solve.submit(PendingProblem(iteration, apply_at, problem), self.plan)

    @contextmanager
    def _keeping_plan(self, iteration: int) -> Iterator[None]:
        """All ranks: on a SnipError, the same on all ranks, keep the current plan and report it."""
        try:
            yield
        except SnipError as failure:
            text = f"keeping {self.plan.label}: {failure}"
            self._reporter.notify(iteration, "refresh_failed", text)

    def _set_plan(self, iteration: int, plan: PrecisionPlan, **more: Any) -> PlanApplied:
        """All ranks: `plan`, which was applied, is the current one from `iteration` on."""
        num_changed = len(changed_linears(self.plan, plan))
        self.plan = plan
        self.history.append((iteration, plan.digest))
        return self._report_plan(iteration, num_changed, **more)

    def _report_plan(self, iteration: int, num_changed: int, **more: Any) -> PlanApplied:
        """All ranks: report the current plan and what every linear runs under it."""
        table = self.model.resolved(self.plan, iteration)
        applied = PlanApplied(self.plan, self.format_shares, num_changed, resolved=table, **more)
        self._reporter.write(Event(iteration, applied))
        self._is_ordinary = False
        self._step_s = []
        return applied

    def _report_increase(self, name: str, increase: float, error: float) -> None:
        """All ranks: log what the plan costs an evaluation, and keep it for the next report."""
        predicted = self._observations.loss_divergence(self.plan)
        prefix = "eval/" if name == "validation" else f"eval/{name}_"
        self._evaluated |= {
            f"{prefix}loss_increase": increase,
            f"{prefix}loss_increase_error": error,
            f"{prefix}loss_divergence": predicted,
        }
        text = f"{increase:+.4g} +- {error:.2g} nat a token against bf16"
        score = "" if predicted is None else f", loss divergence of the plan {predicted:.4g}"
        kind = "evaluation" if name == "validation" else f"{name.replace('_', ' ')} evaluation"
        label = f"{kind} under {self.plan.label}"
        self._reporter.log(f"iteration {self._iteration}: {label}: {text}{score}")
